"""What the host adds to rounds in the engine's loop, on a made-up GPU and on a real one."""

import random
import time
from types import SimpleNamespace

import pytest
import torch

from kdlab.bench.full_width import point
from kdlab.bench.full_width.point import Point, Rounds, rounds_at
from kdlab.bench.full_width.table import MOST_GAP
from kdlab.decode.round_buffer import Mailbox
from kdlab.model.pair import load_pair


class MadeUpEvent:
    """Stamped when the GPU comes to it."""

    def __init__(self, gpu):
        self.gpu, self.at = gpu, None

    def record(self):
        self.gpu.gpu = self.at = max(self.gpu.gpu, self.gpu.host) + self.gpu.event_us

    def query(self):
        return self.at <= self.gpu.host

    def elapsed_time(self, later):
        return 1e-3 * (later.at - self.at)


class MadeUpGpu:
    """A host and a GPU with clocks of their own: launches queue up, a read waits for its copy."""

    def __init__(self, monkeypatch, *, round_us, launch_us=300.0, copy_us=8.0, read_us=100.0, wander=0.0, event_us=0.0):
        self.host = self.gpu = 0.0
        self.round_us, self.launch_us, self.copy_us, self.read_us = round_us, launch_us, copy_us, read_us
        self.wander, self.draws, self.copied, self.rounds = wander, random.Random(2), [], []
        self.event_us = event_us
        monkeypatch.setattr(point, "Mailbox", lambda sources, depth: self)
        monkeypatch.setattr(point, "perf_counter", lambda: 1e-6 * self.host)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: MadeUpEvent(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def __len__(self):
        return len(self.copied)

    def run(self):
        self.host += self.launch_us
        self.rounds.append(self.round_us * self.draws.uniform(1.0 - self.wander, 1.0 + self.wander))
        self.gpu = max(self.gpu, self.host) + self.rounds[-1]

    def post(self):
        self.gpu += self.copy_us
        self.copied.append(self.gpu)

    def take(self):
        self.host = max(self.host, self.copied.pop(0)) + self.read_us

    def gap(self, rounds=8):
        """What `Rounds.loop_us` takes for the host's share, and for a round without it."""
        one = object.__new__(Rounds)
        one.round = SimpleNamespace(run=self.run, record=SimpleNamespace(tensors=[]))
        one.place = lambda: None
        loop_us, row_us = one.loop_us(rounds)
        return loop_us / row_us - 1.0, row_us


@pytest.mark.parametrize("round_us", [1000.0, 30_000.0])
def test_a_host_that_keeps_up_adds_its_copies_alone(monkeypatch, round_us):
    gap, row_us = MadeUpGpu(monkeypatch, round_us=round_us).gap()
    assert gap == pytest.approx(8.0 / round_us)
    assert row_us == pytest.approx(round_us)


def test_what_lies_between_rounds_in_a_row_too_is_not_the_hosts(monkeypatch):
    gap, row_us = MadeUpGpu(monkeypatch, round_us=1000.0, event_us=2.0).gap()
    assert gap == pytest.approx(8.0 / row_us)


@pytest.mark.parametrize("read_us", [1000.0, 4000.0])
def test_a_host_that_is_late_is_seen(monkeypatch, read_us):
    gap, row_us = MadeUpGpu(monkeypatch, round_us=1000.0, read_us=read_us).gap()
    assert row_us == pytest.approx(1000.0, rel=0.05)  # a row begins on a GPU that ran dry
    assert gap > 5 * MOST_GAP


def test_a_host_that_stalls_once_is_not_what_rounds_take(monkeypatch):
    gpu = MadeUpGpu(monkeypatch, round_us=1000.0)
    launches = []

    def run():
        launches.append(gpu.host)
        gpu.host += 50_000.0 if len(launches) == 38 else 0.0
        MadeUpGpu.run(gpu)

    gpu.run = run
    gap, row_us = gpu.gap()
    assert (gap, row_us) == (pytest.approx(0.008, abs=0.002), pytest.approx(1000.0))


def test_a_clock_that_wanders_is_not_taken_for_the_host(monkeypatch):
    gpu = MadeUpGpu(monkeypatch, round_us=70_000.0, wander=0.05)
    gap, row_us = gpu.gap(rounds=2)
    assert gap == pytest.approx(8.0 / row_us)
    row, loop = (sum(gpu.rounds[begin : begin + 2]) for begin in (2, 4))
    assert abs(loop / row - 1.0) > MOST_GAP, "which the times of the loops alone would call the host's"


@pytest.mark.gpu
def test_a_late_host_is_seen_on_a_gpu(monkeypatch):
    pair = load_pair("bundled", device="cuda", dtype="bfloat16")
    one, _ = rounds_at(pair, Point(9, 1, 64, 0.8))
    one.round.capture()
    in_time, _ = one.loop_us(10)
    assert in_time < 10_000.0
    take = Mailbox.take

    def late(self):
        time.sleep(0.02)
        return take(self)

    monkeypatch.setattr(Mailbox, "take", late)
    loop_us, row_us = one.loop_us(10)
    assert row_us < 10_000.0 < loop_us
