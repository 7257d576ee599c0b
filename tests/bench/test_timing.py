"""Timing: how many sets, samples and turns (a clock of the test's own), and on a GPU the sanity of what is measured."""

import gc
import itertools
import types
import weakref

import pytest
import torch

from kdlab.bench import timing
from kdlab.errors import ArgumentError, UnsupportedDevice
from kdlab.kernels.capture import capture
from kdlab.kernels.cost import Cost

MB = 1 << 20


class Clock:
    """Stands in for CUDA events: a run that is called adds its own time."""

    def __init__(self, monkeypatch):
        self.now, self.order, self.bursts, self.rested = 0.0, [], [], 0.0
        monkeypatch.setattr(timing, "times_us", self.times)
        monkeypatch.setattr(timing.time, "sleep", self.rest)

    def rest(self, seconds):
        self.rested += 1e6 * seconds

    def times(self, runs):
        found = []
        for run in runs:
            before = self.now
            run()
            found.append(self.now - before)
        self.bursts.append(sum(found))
        return found

    def call(self, name, us):
        def run():
            self.now += us
            self.order.append(name)

        return run


def passes(clock, **us):
    return {name: timing.Pass(clock.call(name, time), 4, []) for name, time in us.items()}


@pytest.mark.parametrize(
    ("size", "count"), [(1, 8), (60 * MB, 2), (4 * MB, 30), (7 * MB, 18), (600 * MB, 2), (MB // 4, 480), (MB // 8, 8)]
)
def test_enough_sets_to_pass_the_cache_twice_or_a_few_that_never_will(size, count):
    assert timing.rotations(size, l2_bytes=60 * MB) == count


def test_eight_sets_that_pass_the_cache_are_cold():
    assert timing.rotations(13 * MB, l2_bytes=50 * MB) == timing.WARM_ROTATIONS == 8
    assert not timing.stays_in_cache(13 * MB, l2_bytes=50 * MB)
    assert timing.stays_in_cache(MB // 8, l2_bytes=50 * MB)


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_a_set_has_a_size(size):
    with pytest.raises(ArgumentError, match="bytes_per_set"):
        timing.rotations(size, l2_bytes=MB)


def test_arms_take_turns_and_the_first_of_a_turn_changes(monkeypatch):
    clock = Clock(monkeypatch)
    samples = timing.sample(passes(clock, a=100.0, b=300.0), seconds=0.01)
    assert {name: set(times) for name, times in samples.items()} == {"a": {25.0}, "b": {75.0}}
    assert len(samples["a"]) == len(samples["b"]) >= 5
    turns = ["".join(clock.order[i : i + 4]) for i in range(2, len(clock.order), 4)]
    assert turns == ["aabb", "bbaa"] * (len(turns) // 2) + ["aabb"] * (len(turns) % 2)


def test_what_runs_ahead_of_a_short_pass_is_never_another(monkeypatch):
    """The twin: a pass behind another one takes longer here, and its samples would be two numbers."""
    clock = Clock(monkeypatch)

    def call(name, us):
        def run():
            clock.now += us if clock.order[-1:] == [name] else 1.1 * us
            clock.order.append(name)

        return timing.Pass(run, 1, ())

    samples = timing.sample({"a": call("a", 500.0), "b": call("b", 700.0), "long": call("long", 15_000.0)}, 0.5)
    assert (set(samples["a"]), set(samples["b"])) == ({500.0}, {700.0})
    assert len(samples["long"]) >= 5


def test_a_long_pass_stands_between_two_rests(monkeypatch):
    clock, rests = Clock(monkeypatch), []
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: rests.append(len(clock.order)))
    timing.sample(passes(clock, a=500.0, long=11_000.0), 0.5)
    places = [place for place, name in enumerate(clock.order) if name == "long" and place >= 2]
    assert len(places) > 4
    assert all(place + 1 in rests for place in places)
    assert all(place in rests for place in places[1:])


@pytest.mark.parametrize(("us", "seconds"), [(500.0, 0.1), (1e6, 0.1), (10.0, 1.0)])
def test_the_samples_fit_the_seconds_with_five_at_least(monkeypatch, us, seconds):
    clock = Clock(monkeypatch)
    count = len(timing.sample(passes(clock, a=us), seconds)["a"])
    assert 5 <= count <= 100
    assert clock.now + clock.rested <= max(1e6 * seconds + 2 * us, 8 * us + clock.rested)


def test_the_device_rests_between_bursts_that_end_before_its_power_limit(monkeypatch):
    clock = Clock(monkeypatch)
    timing.sample(passes(clock, a=1000.0, b=3000.0), seconds=0.5)
    assert max(clock.bursts) <= 22_000
    assert clock.rested == pytest.approx(clock.now - 4000.0, rel=0.01)


def test_the_first_sample_of_a_long_pass_comes_after_a_rest(monkeypatch):
    clock, rested = Clock(monkeypatch), []

    def run():
        rested.append(clock.rested)
        clock.now += 50_000.0

    samples = timing.sample({"a": timing.Pass(run, 1, ())}, seconds=0.1)["a"]
    assert len(samples) == 5
    assert all(before < after for before, after in itertools.pairwise(rested[-6:]))


def test_a_slow_eager_arm_is_not_run_on_every_set(monkeypatch):
    clock = Clock(monkeypatch)
    for name, us, kept in (("slow", 8e3, 3), ("stuck", 1e6, 2), ("quick", 10.0, 100)):
        assert timing.make_pass([clock.call(name, us)] * 100, graph=False).num_calls == kept


@pytest.mark.parametrize("graph", [True, False])
def test_one_slow_call_does_not_choose_how_many_sets_are_timed(monkeypatch, graph):
    """The twin, a hiccup in the first timed call, left so few sets that the cache held them all."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(timing, "capture", lambda calls: types.SimpleNamespace(replay=lambda: None))

    def num_calls(slow):
        times = itertools.chain([1.0, slow], itertools.repeat(190.0))

        def run():
            clock.now += next(times)

        return timing.make_pass([run] * 400, graph=graph).num_calls

    assert num_calls(slow=190.0) == num_calls(slow=5000.0) >= (400 if graph else 100)


@pytest.mark.parametrize("graph", [True, False])
def test_a_pass_keeps_alive_what_its_calls_hold(monkeypatch, graph):
    """A graph holds addresses: memory that only a call held would be another tensor's when the graph is replayed."""
    Clock(monkeypatch)
    monkeypatch.setattr(timing, "capture", lambda calls: types.SimpleNamespace(replay=lambda: None))

    class Held:
        def __call__(self):
            pass

    calls = [Held(), Held()]
    held = [weakref.ref(call) for call in calls]
    made = timing.make_pass(calls, graph=graph)
    del calls
    gc.collect()
    assert made.num_calls >= 2
    assert all(call() is not None for call in held)


@pytest.mark.gpu
def test_a_graph_reads_what_its_calls_were_given():
    sums = torch.zeros(2, device="cuda")

    def make(index):
        values = torch.full((1024,), index + 1.0, device="cuda")
        return lambda: sums[index].copy_(values.sum())

    made = timing.make_pass([make(0), make(1)])
    for _ in range(4):
        torch.full((1024,), 99.0, device="cuda")  # takes the memory of what was let go
    made.run()
    assert sums.tolist() == [1024.0, 2048.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    for work, arguments in ((timing.rotations, 1), (timing.graph_times_us, [int]), (timing.eager_times_us, [int])):
        with pytest.raises(UnsupportedDevice, match="needs a CUDA GPU"):
            work(arguments)


def test_the_floor_is_the_longer_of_bytes_and_operations():
    rates = {"bytes_per_s": 4e12, "flops_per_s": 800e12}
    assert Cost(4_000_000).floor_us(**rates) == pytest.approx(1.0)
    assert Cost(4_000_000, 8_000_000_000).floor_us(**rates) == pytest.approx(10.0)
    assert Cost(1, 2) + Cost(3) == Cost(4, 2)
    with pytest.raises(ArgumentError, match="flops_per_s"):
        Cost(1).floor_us(bytes_per_s=1.0, flops_per_s=0.0)


def copies(mb, count):
    """A kernel that reads and writes so many MB each; the driver's own copy slows down at large sizes."""
    pairs = [torch.randn(2, mb * MB // 4, device="cuda") for _ in range(count)]
    return [lambda pair=pair: torch.mul(pair[0], 1.0, out=pair[1]) for pair in pairs]


@pytest.mark.gpu
def test_a_copy_never_passes_the_bandwidth_of_the_device():
    large = copies(512, 2)
    ceiling = 2 * 512 * MB / min(timing.graph_times_us(large, seconds=0.1))
    for size in (1, 8, 64):
        times = timing.graph_times_us(copies(size, timing.rotations(2 * size * MB)), seconds=0.1)
        assert 2 * size * MB / sorted(times)[len(times) // 2] <= 1.03 * ceiling


@pytest.mark.gpu
def test_one_set_alone_is_warm_and_would_flatter():
    cold = timing.graph_times_us(copies(8, timing.rotations(16 * MB)), seconds=0.05)
    warm = timing.graph_times_us(copies(8, 1) * 4, seconds=0.05)
    assert sorted(warm)[len(warm) // 2] < 0.8 * sorted(cold)[len(cold) // 2]


@pytest.mark.gpu
def test_a_graph_runs_every_call_once_a_round_and_eager_costs_more():
    counters = torch.zeros(3, dtype=torch.int64, device="cuda")
    calls = [lambda i=i: counters[i].add_(1) for i in range(3)]
    graph = timing.graph_times_us(calls, seconds=0.05)
    assert counters.max() - counters.min() <= 8, "but for the first call, which warms up more often"
    eager = timing.eager_times_us(calls, seconds=0.05)
    assert 0.5 < sorted(graph)[len(graph) // 2] < 0.7 * sorted(eager)[len(eager) // 2]


@pytest.mark.gpu
def test_what_cannot_be_captured_says_why_and_leaves_the_device_well():
    one = torch.ones(1, device="cuda")

    def stops():
        raise KeyError("of the call itself")

    with pytest.raises(KeyError, match="of the call itself"):
        capture([lambda: stops() if torch.cuda.is_current_stream_capturing() else None])
    with pytest.raises(RuntimeError):
        capture([one.item])
    assert float(one + 1) == 2.0
    assert torch.rand(4, device="cuda").isfinite().all()


@pytest.mark.gpu
def test_two_arms_of_one_work_agree():
    calls = copies(32, 4)
    samples = timing.interleaved({"one": calls, "two": calls}, seconds=0.2)
    one, two = (sorted(times)[len(times) // 2] for times in samples.values())
    assert one == pytest.approx(two, rel=0.03)
