"""The watch over the other ranks: what is no death of theirs, and a second group of one job."""

import os
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from kdlab.errors import ArgumentError, KdlabError
from kdlab.model import rank_watch
from kdlab.model import ranks as module
from kdlab.model.rank_watch import RankWatch
from kdlab.model.ranks import init_ranks
from tests.rank_processes import free_port, run_ranks, values_of

PATIENCE_S = 1.0


def die_in_the_second_group(rank, port):
    """As under torchrun: the launcher holds the store, which outlives the first group and what ranks wrote there."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    for last in (False, True):
        ranks = init_ranks("cpu", timeout=PATIENCE_S)
        assert ranks.all_reduce(torch.ones(1), "mlp").item() == 2
        if not last:
            ranks.close()
    if rank == 1:
        os._exit(9)
    time.sleep(10 * PATIENCE_S)  # as in a collective of NCCL, which never says that rank 1 is gone


def test_a_second_group_of_one_job_is_watched_too(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other, lost = run_ranks(2, die_in_the_second_group, store.port, folder=tmp_path)
    assert (other.exitcode, lost.exitcode) == (1, 9), other.said + lost.said
    assert "rank 1 gave no sign of life for 1 s" in other.said


def lose_the_store_while_meeting(rank, port):
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")  # rank 0 holds it
    if rank == 0:
        module._meet = lambda *_: os._exit(9)
    init_ranks("cpu", timeout=PATIENCE_S)


def test_a_store_that_is_gone_before_all_have_met_is_said(tmp_path):
    lost, other = run_ranks(2, lose_the_store_while_meeting, free_port(), folder=tmp_path)
    assert (lost.exitcode, other.exitcode) == (9, 1), other.said
    assert "rank 0 or the launcher of the ranks is gone" in other.said


def start_alone(rank, held, port):
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE=str(held == "launcher"))
    if rank == 1:
        return None
    with pytest.raises(KdlabError) as late:
        init_ranks("cpu", start_timeout=PATIENCE_S)
    return str(late.value)


@pytest.mark.parametrize(
    ("held", "named"), [("launcher", r"rank 0 of 2: ranks \[1\] did not"), ("rank 0", "not every rank started")]
)
def test_a_rank_that_never_starts_is_named_within_the_time_for_it(held, named, tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    began = time.monotonic()
    ended = run_ranks(2, start_alone, held, store.port if held == "launcher" else free_port(), folder=tmp_path)
    assert re.match(named, values_of(ended)[0])
    assert time.monotonic() - began < 20 * PATIENCE_S


@pytest.mark.parametrize("name", ["timeout", "start_timeout"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e10, "5"])
def test_times_that_nobody_can_wait_for_are_refused(name, seconds):
    with pytest.raises(ArgumentError, match=f"^{name}: expected a"):
        init_ranks("cpu", **{name: seconds})


class GoneStore:
    """Fails while the watch takes its leave."""

    def __init__(self):
        self.asked, self.leaving = threading.Event(), threading.Event()

    def add(self, key, amount):
        self.asked.set()
        self.leaving.wait(10)
        raise RuntimeError("the store is gone")


def test_a_store_that_fails_while_a_rank_leaves_is_no_error(monkeypatch):
    raised, store = [], GoneStore()
    monkeypatch.setattr(threading, "excepthook", raised.append)
    watch = RankWatch(store, 1, 2, 0.1)
    assert store.asked.wait(10)
    leaving = threading.Thread(target=watch.leave)
    leaving.start()
    assert watch._ended.wait(10)
    store.leaving.set()
    leaving.join(10)
    watch.join(10)
    assert raised == []
    assert not watch.is_alive()


def test_ranks_that_were_stopped_together_lose_nobody(monkeypatch):
    """Time goes on for a stopped process; the first rank to go on sees the old counts of the others."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rank_watch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(RankWatch, "start", lambda self: None)
    store = dist.HashStore()
    watch = RankWatch(store, 0, 2, PATIENCE_S)

    def look(after_s):
        clock.now += after_s
        return watch._look()

    store.add("1", 1)
    assert look(0.1) is None
    assert look(60.0) is None
    assert [look(0.3) for _ in range(4)] == [None, None, None, 1]
