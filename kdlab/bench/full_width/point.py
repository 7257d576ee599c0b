"""One point of the full-width benchmark: a round of given rows, streams and context, whole and stage by stage."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from statistics import mean, median
from time import perf_counter
from typing import Any, TypeVar

import torch

from kdlab.bench.full_width.parts import part_work
from kdlab.bench.full_width.routing import plan_routing
from kdlab.bench.segments import Chain, record_segments
from kdlab.bench.timing import Pass, sample, times_us
from kdlab.decode.round import Round
from kdlab.decode.round_buffer import Mailbox
from kdlab.decode.settings import Settings, make_settings
from kdlab.errors import UnsupportedDevice
from kdlab.model.cache import LatentCache
from kdlab.model.pair import Pair
from kdlab.model.ranks import ONE_RANK, Ranks
from kdlab.study.step_cost import Step

_SPARE_ROWS = 4096  # rounds that are timed commit rows behind the context
_MANY_TOKENS = 2**20
_LEAST_US = 300.0  # a graph as long as this hides its own launch
_MOST_TIMES, _TRIALS = 200, 2
_STRETCH_US, _FEWEST_TURNS, _MOST_TURNS = 25_000.0, 2, 8  # rounds of the engine's loop that are timed as one
_STATEFUL = ("commit",)
"""Stages that move the streams on: these are put back before each sample, within the room behind the context."""

T = TypeVar("T")


class NoRoom(UnsupportedDevice):
    """A point does not fit some rank's GPU: all ranks leave it out."""


@dataclass(frozen=True, slots=True)
class Point:
    """What one round is asked for; `g` is the exponent of correlated routing, see `kdlab.study.experts`."""

    rows: int
    streams: int
    context: int
    g: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found at one point: samples in microseconds."""

    point: Point
    step: Step
    whole: list[float]  # the round as one graph
    loop_us: float  # a round in the engine's loop of launch, copy to the host and read
    row_us: float  # a round of several launched one behind the other, and nothing else
    stages: dict[str, list[float]]  # each alone, with all its calls; empty where they were not asked for
    parts: dict[str, list[float]]  # of stages, each by itself, see `part_work`; they are in their stages' times already
    alone: list[float]  # of several GPUs: the round without its collectives, of the slowest rank

    @property
    def case(self) -> dict[str, Any]:
        """The point and the step, for a result row."""
        return asdict(self.point) | {"ranks": self.step.ranks, "experts": self.step.experts}


def measure(pair: Pair, point: Point, *, stages: bool, seconds: float = 0.1, stage_seconds: float = 0.03) -> Measured:
    """Time one point; of several ranks that run, each makes this call.

    Args:
        pair: of `random_pair`.
        point: what is asked; one row is AR, more are DDTree.
        stages: time every stage alone too, and parts of two, on one GPU.
        seconds: for the round.
        stage_seconds: for each stage.

    Raises:
        NoRoom: its caches do not fit beside the weights, on this rank or another one.
        torch.OutOfMemoryError: the round itself does not, on this rank.
    """
    (one, step), ranks = _where_all_have_room(pair.ranks, partial(rounds_at, pair, point)), pair.ranks
    by_stage = one.stages(stage_seconds) if stages else {}
    by_part = one.stages_of(part_work(pair.target, step.tokens), stage_seconds) if stages else {}
    whole = one.whole(seconds, ranks)
    turns = max(_FEWEST_TURNS, min(_MOST_TURNS, int(_STRETCH_US / min(whole))))
    loop_us, row_us = ranks.largest(one.loop_us(turns))
    alone = []
    if ranks.group is not None:
        with without_collectives(pair):
            alone = one.whole(seconds, ranks)
    return Measured(point, step, whole, loop_us, row_us, by_stage, by_part, alone)


def _where_all_have_room(ranks: Ranks, make: Callable[[], T]) -> T:
    """Return what is made, or raise on every rank alike: those that have room would wait for one that has none."""
    made, problem = None, ""
    try:
        made = make()
    except (torch.OutOfMemoryError, UnsupportedDevice) as error:
        problem = str(error)
    lacking = ranks.largest([float(bool(problem))])[0] > 0.0
    if made is None or lacking:
        raise NoRoom(problem or "another rank has no room for it")
    return made


def rounds_at(pair: Pair, point: Point) -> tuple["Rounds", Step]:
    """Return the round of a point, its routing planned, and what a step of it is asked for."""
    settings = make_settings(
        pair,
        point.streams,
        method="ar" if point.rows == 1 else "ddtree",
        budget=point.rows - 1,
        max_new_tokens=_MANY_TOKENS,
        stop_token_ids=[],
        streams=point.streams,
        graph="off",
    )
    step = Step.routed(
        pair.target.config,
        point.rows,
        point.g,
        streams=point.streams,
        context=point.context,
        ranks=pair.ranks.size,
        experts=pair.ranks.experts,
        top_k=max(1, settings.method.top_k),
        committed=1,  # random weights accept nothing
    )
    plan_routing(pair.target, step.tokens, step.distinct)
    return Rounds(pair, settings, point.context), step


@contextlib.contextmanager
def without_collectives(pair: Pair) -> Iterator[None]:
    """Let every rank run its slice alone inside: the same weights and shapes, and nothing is exchanged."""
    ranks = pair.ranks
    models = [model for model in (pair.target, pair.drafter) if model is not None]
    modules = (module for model in models for module in model.modules())
    holders: list[Any] = [module for module in modules if vars(module).get("ranks") is ranks]
    alone = Ranks.slice_of(ranks.rank, ranks.size, ranks.experts)
    try:
        for module in holders:
            module.ranks = alone
        yield
    finally:
        for module in holders:
            module.ranks = ranks


class Rounds:
    """A round whose streams stand at a context of random rows."""

    def __init__(self, pair: Pair, settings: Settings, context: int) -> None:
        rows = context + _SPARE_ROWS
        cache = LatentCache.allocate(pair.target.config, settings.streams, rows, pair.dtype, pair.device)
        cache.pages.normal_()
        draft = None
        if settings.method.build is not None:
            draft = pair.new_context(settings.streams, rows)
            draft.keys.normal_()
            draft.values.normal_()
        self.round, self.context = Round(pair, settings, cache, draft), context

    def place(self) -> None:
        """Let every stream run from the context on."""
        streams = self.round.streams
        streams.start.fill_(self.context)
        streams.prompt.copy_(torch.arange(len(streams.prompt)))
        streams.running.fill_(True)
        streams.num_tokens.fill_(1)
        streams.cap.fill_(_MANY_TOKENS)
        streams.stop.fill_(2 * _MANY_TOKENS)

    def stages(self, seconds: float) -> dict[str, list[float]]:
        """Return the samples of every stage, in the round's order."""
        self.place()
        return self.stages_of(self.round.run, seconds)

    def stages_of(self, work: Callable[[], object], seconds: float) -> dict[str, list[float]]:
        """Return the samples of every stage of a call, in its order."""
        work()
        segments, found = record_segments(work), {}
        for name in segments.stages():
            self.place()
            segments.replay(until=name)
            chain = segments.chain(name)
            run = partial(self._from_start, chain) if name in _STATEFUL else chain
            times = _repeat(chain, run)
            found[name] = sample({"": Pass(run, times, ())}, seconds)[""]
        return found

    def whole(self, seconds: float, ranks: Ranks = ONE_RANK) -> list[float]:
        """Return samples of the round as one graph, of `ranks` that time it together."""
        self.round.streams.running.fill_(False)
        self.round.capture()
        self.place()
        return sample({"": Pass(self._again, 1, ())}, seconds, ranks)[""]

    def _again(self) -> None:
        self._from_start(self.round.run)

    def _from_start(self, run: Callable[[], object]) -> None:
        self.round.streams.start.fill_(self.context)
        run()

    def loop_us(self, rounds: int) -> tuple[float, float]:
        """Return microseconds a round as the engine runs them, and without the host: launches alone, in a row.

        The engine launches a round, lets its record be copied and reads the one before. What that adds is the time in
        which no round runs, over that of launches in a row. It is not what a loop takes over a row: without rests an
        H200 is at its power limit, and the same 26 ms took 24.9 to 28.4 within a second (33 rows, 16 streams, 32k, 20
        layers), where the host adds 0.006.

        Args:
            rounds: of each stretch, 2 at least; three of the loop stand between four without the host.

        Returns:
            The median stretch's, of each kind: a host that stalls once, or a clock that falls, is not what rounds take.
        """
        mailbox = Mailbox(self.round.record.tensors, 2)
        self.place()

        def hand_over() -> None:
            mailbox.post()
            if len(mailbox) > 1:
                mailbox.take()

        def nothing() -> None:
            pass

        torch.cuda.synchronize()
        order = [nothing, nothing, hand_over, nothing, hand_over, nothing, hand_over, nothing]
        # The first one begins on an idle GPU, which waits for its first launch.
        _, *stretches = [_run_marked(self.round.run, behind, rounds) for behind in order]
        torch.cuda.synchronize()
        rows, loops = stretches[::2], stretches[1::2]
        row_us = median(1e3 * row[0].start.elapsed_time(row[-1].stop) for row in rows) / rounds
        return row_us + median(map(_outside_us, loops)) - median(map(_outside_us, rows)), row_us


@dataclass(frozen=True, slots=True)
class _Mark:
    """Events around a round, and what its launch took the host if the GPU had nothing to do meanwhile."""

    start: torch.cuda.Event
    stop: torch.cuda.Event
    awaited_us: float


def _run_marked(run: Callable[[], object], behind: Callable[[], object], rounds: int) -> list[_Mark]:
    """Run rounds, each with what the host does behind it."""
    marks: list[_Mark] = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        begin = perf_counter()
        run()
        # A GPU that has run dry stamps the start at once, and waits for the launch.
        dry = bool(marks) and marks[-1].stop.query()
        awaited_us = 1e6 * (perf_counter() - begin) if dry else 0.0
        stop.record()
        marks.append(_Mark(start, stop, awaited_us))
        behind()
    return marks


def _outside_us(marks: Sequence[_Mark]) -> float:
    """Return the mean time between two rounds of a stretch."""
    return mean(1e3 * one.stop.elapsed_time(two.start) + two.awaited_us for one, two in pairwise(marks))


def _repeat(chain: Chain, run: Callable[[], object]) -> int:
    """Repeat a stage until `run`, which calls its chain, is long enough to time; return how often that is."""
    times = 1
    for _ in range(2):  # of a short graph the first look sees little but its launch
        us = min(times_us([run] * _TRIALS))
        if us >= _LEAST_US or times == _MOST_TIMES:
            break
        times = min(_MOST_TIMES, math.ceil(times * _LEAST_US / us))
        chain.repeat(times)
    return times
