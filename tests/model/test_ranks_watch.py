"""The watch over the other ranks: what is no death of theirs, and a second group of one job."""

import os
import time

import torch
import torch.distributed as dist

from kdlab.model.ranks import init_ranks
from tests.rank_processes import run_ranks

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
