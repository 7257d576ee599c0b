"""Device time of short calls: CUDA graphs, buffers past the L2 cache, arms in turns, samples as many as time allows.

A call closes over its own buffers. The caller gives one call a buffer set, `rotations(...)` of them, and a pass runs
every call once in order: when a set comes round again the cache has forgotten it. A sample is one pass, as
microseconds a call. Passes are timed with CUDA events; what the host does inside an eager call (copies, a heap) is in.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from kdlab.checks import check_float, check_int
from kdlab.errors import ArgumentError, UnsupportedDevice
from kdlab.kernels.capture import capture
from kdlab.model.ranks import ONE_RANK, Ranks

Call = Callable[[], object]

MAX_ROTATIONS, WARM_ROTATIONS = 512, 8
"""Sets so small that MAX_ROTATIONS of them stay in the cache are timed warm, as the op before leaves them."""

_MIN_PASS_US = 300.0  # the gap between two graph launches, a few microseconds, is below 1 % of it
_MAX_EAGER_US = 20_000.0  # an eager call is slow by the host's work, which no cache of the device shortens
_EAGER_TRIES = 5
_MAX_NODES = 4096
_MIN_SAMPLES, _MAX_SAMPLES = 5, 100
_WARMUP_US = 10_000.0  # clocks come up from idle within it
_BURST_US, _BURST_RUNS = 20_000.0, 64
"""Runs between two rests: after some 50 ms of matrix products alone an H200 meets its power limit and slows by a tenth,
so that a time would depend on how long one measures."""
_SHORT_US = 10_000.0
"""A pass shorter than this is timed right behind an untimed one of its own, a longer one between two rests. In turns
alone, 31 of 635 arms of the kernel benchmark took 2 to 13 % more in every other turn, as another arm had run ahead: it
left other lines in the cache, and less of the card's power."""


def rotations(bytes_per_set: int, *, l2_bytes: int | None = None, device: torch.device | None = None) -> int:
    """Return how many buffer sets together hold twice the L2 cache, 2 at least; WARM_ROTATIONS for very small sets.

    Args:
        bytes_per_set: what one call reads and writes.
        l2_bytes: size of the cache; asked of `device` (default: the current GPU) when None.

    Raises:
        UnsupportedDevice: no GPU to ask.
    """
    if stays_in_cache(bytes_per_set, l2_bytes=l2_bytes, device=device):
        return WARM_ROTATIONS
    return max(2, math.ceil(2 * (l2_bytes or _l2_bytes(device)) / bytes_per_set))


def stays_in_cache(bytes_per_set: int, *, l2_bytes: int | None = None, device: torch.device | None = None) -> bool:
    """Say whether sets are so small that MAX_ROTATIONS of them do not hold twice the L2 cache; see `rotations`."""
    bytes_per_set = check_int("bytes_per_set", bytes_per_set, minimum=1)
    return bytes_per_set * MAX_ROTATIONS < 2 * (l2_bytes or _l2_bytes(device))


def _l2_bytes(device: torch.device | None) -> int:
    require_gpu("rotations")
    return int(torch.cuda.get_device_properties(device or torch.cuda.current_device()).L2_cache_size)


def graph_times_us(calls: Sequence[Call], *, seconds: float = 0.2, warmup: int = 1) -> list[float]:
    """Time calls in one CUDA graph that runs every one of them equally often; the outputs of all calls stay apart.

    Args:
        calls: capturable, one a buffer set.
        seconds: to spend, half of it at rest; at least 5 samples are taken.
        warmup: eager runs of every call before the capture (compilation, allocation).

    Returns: one sample a replay, microseconds a call.

    Raises:
        UnsupportedDevice: no GPU.
        ArgumentError: no call.
    """
    return interleaved({"": calls}, seconds=seconds, warmup=warmup)[""]


def eager_times_us(calls: Sequence[Call], *, seconds: float = 0.2, warmup: int = 1) -> list[float]:
    """Time calls one after another as Python launches them: `graph_times_us` without the graph."""
    return interleaved({"": calls}, seconds=seconds, warmup=warmup, graph=False)[""]


def interleaved(
    arms: Mapping[str, Sequence[Call]], *, seconds: float = 0.2, warmup: int = 1, graph: bool = True
) -> dict[str, list[float]]:
    """Time several arms in turns, the arm that begins changing with every turn, so that a drift meets all alike.

    Args:
        arms: calls of each arm, as in `graph_times_us`.
        seconds: for all arms together, rests included.
        warmup: eager runs of every call first.
        graph: one CUDA graph an arm, else eager.

    Returns: samples of each arm in microseconds a call, equally many.
    """
    require_gpu("timing")
    seconds = check_float("seconds", seconds, above=0.0)
    if not arms or not all(arms.values()):
        raise ArgumentError("arms", "at least one, and a call in each", [name for name in arms if not arms[name]])
    return sample({name: make_pass(calls, warmup=warmup, graph=graph) for name, calls in arms.items()}, seconds)


def require_gpu(what: str) -> None:
    """Raise UnsupportedDevice when torch finds no CUDA GPU."""
    if not torch.cuda.is_available():
        raise UnsupportedDevice(f"{what}: needs a CUDA GPU, and torch finds none on this machine")


@dataclass(frozen=True, slots=True)
class Pass:
    """All calls of an arm, ready to be run and timed as one."""

    run: Call
    num_calls: int
    calls: Sequence[Call]  # kept alive: a graph replays with the addresses of what they hold, and owns none of it


def make_pass(calls: Sequence[Call], *, warmup: int = 1, graph: bool = True) -> Pass:
    """Warm calls up and capture them, or leave them eager: the part that may fail for one arm alone."""
    if not graph:
        calls = _few_enough(calls)
    for _ in range(warmup):
        for call in calls:
            call()
    if graph:
        return _graph_pass(calls)

    def run() -> None:
        for call in calls:
            call()

    return Pass(run, len(calls), calls)


def sample(passes: Mapping[str, Pass], seconds: float, ranks: Ranks = ONE_RANK) -> dict[str, list[float]]:
    """Time passes in turns for so many seconds, half of them rest: the other part of `interleaved`.

    Of several ranks each makes this call with the same passes; they begin together, and all get the slowest's samples.
    """
    names = list(passes)
    once = dict(zip(names, _times_together([passes[name].run for name in names], ranks), strict=True))
    runs = {name: [passes[name].run] * (2 if us < _SHORT_US else 1) for name, us in once.items()}
    runs_us = {name: us * len(runs[name]) for name, us in once.items()}
    turn_us = sum(runs_us.values())
    # One turn at least, and its rest: of rounds of 40 to 115 ms one right behind another was up to 9 % slower.
    warm = math.ceil(min(_WARMUP_US, 2e5 * seconds) / turn_us)
    turns = min(_MAX_SAMPLES, max(_MIN_SAMPLES, int(5e5 * seconds / turn_us) - warm))
    order = [names[(turn + place) % len(names)] for turn in range(warm + turns) for place in range(len(names))]
    samples: dict[str, list[float]] = {name: [] for name in names}
    for burst in _bursts(order, runs_us, alone={name for name in names if len(runs[name]) == 1}):
        times = _times_together([run for name in burst for run in runs[name]], ranks)
        _rest(sum(times))
        last = itertools.accumulate(len(runs[name]) for name in burst)  # of each name's runs
        for name, end in zip(burst, last, strict=True):
            samples[name].append(times[end - 1] / passes[name].num_calls)
    return {name: found[warm:] for name, found in samples.items()}


def _bursts(order: Sequence[str], runs_us: Mapping[str, float], alone: Set[str]) -> Iterator[list[str]]:
    """Cut an order of arms into what runs between two rests."""
    burst: list[str] = []
    for name in order:
        us = sum(runs_us[one] for one in [*burst, name])
        is_full = us > _BURST_US or len(burst) == _BURST_RUNS
        if burst and (is_full or not alone.isdisjoint((name, burst[-1]))):
            yield burst
            burst = []
        burst.append(name)
    yield burst


def _graph_pass(calls: Sequence[Call]) -> Pass:
    """Capture the calls, as often round as a pass needs to be long enough to time."""
    once = capture(calls)
    once.replay()
    pass_us = times_us([once.replay])[0]
    rounds = min(math.ceil(_MIN_PASS_US / max(pass_us, 1.0)), max(1, _MAX_NODES // len(calls)))
    if rounds > 1:
        once = capture([*calls] * rounds)
    return Pass(once.replay, len(calls) * rounds, calls)


def _few_enough(calls: Sequence[Call]) -> Sequence[Call]:
    """Drop eager calls that a pass has no time for, by the quickest of a few: how many must not hang on one hiccup.

    A graph keeps all its calls: of fewer, which the cache may hold, `naive` over 256 keys took 122 us in one run and
    182 in the next.
    """
    calls[0]()
    call_us = min(times_us([calls[0]] * _EAGER_TRIES))
    return calls[: max(2, math.ceil(_MAX_EAGER_US / max(call_us, 1.0)))]


def _rest(us: float) -> None:
    """Leave the device idle for as long as it has worked; what it did on the host's clock needs none of that."""
    time.sleep(1e-6 * min(us, 2.0 * _BURST_US))


def _times_together(runs: Sequence[Call], ranks: Ranks) -> list[float]:
    """Time runs that the streams of all ranks begin at one moment; ranks that decide by the times decide alike."""
    if ranks.group is None:
        return times_us(runs)
    meeting = torch.zeros(1, device=ranks.device)
    return ranks.largest(times_us([lambda: ranks.all_reduce(meeting, "check"), *runs])[1:])


def times_us(runs: Sequence[Call]) -> list[float]:
    """Run in order on the current stream and return the microseconds between the events around each run."""
    torch.cuda.synchronize()
    pairs = []
    for run in runs:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(stop) for start, stop in pairs]
