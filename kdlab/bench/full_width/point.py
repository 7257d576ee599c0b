"""One point of the full-width benchmark: a round of given rows, streams and context, whole and stage by stage."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

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
    row_us: float  # the same rounds in the same minute, launched one behind the other and nothing else
    stages: dict[str, list[float]]  # each alone, with all its calls; empty where they were not asked for
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
        stages: time every stage alone too, on one GPU.
        seconds: for the round.
        stage_seconds: for each stage.

    Raises:
        NoRoom: its caches do not fit beside the weights, on this rank or another one.
        torch.OutOfMemoryError: the round itself does not, on this rank.
    """
    (one, step), ranks = _where_all_have_room(pair.ranks, partial(rounds_at, pair, point)), pair.ranks
    by_stage = one.stages(stage_seconds) if stages else {}
    whole = one.whole(seconds, ranks)
    turns = max(_FEWEST_TURNS, min(_MOST_TURNS, int(_STRETCH_US / min(whole))))
    loop_us, row_us = ranks.largest(one.loop_us(turns))
    alone = []
    if ranks.group is not None:
        with without_collectives(pair):
            alone = one.whole(seconds, ranks)
    return Measured(point, step, whole, loop_us, row_us, by_stage, alone)


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
        self.round.run()
        segments, found = record_segments(self.round.run), {}
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

        The engine launches a round, lets its record be copied and reads the one before. Both run without rests and in
        turns, as an H200 at its power limit lowers its clock: 21.0 ms of a round with rests are 21.6 either way without
        (65 rows, 16 streams, 8k, 20 layers). What the two differ by is the host's.

        Args:
            rounds: of each stretch; three of the loop stand between four without the host.

        Returns:
            The median stretch of each kind: a host that stalls once, or a clock that falls, is not what rounds take.
        """
        mailbox = Mailbox(self.round.record.tensors, 2)
        self.place()

        def row() -> None:
            for _ in range(rounds):
                self.round.run()

        def loop() -> None:
            for _ in range(rounds):
                self.round.run()
                mailbox.post()
                if len(mailbox) > 1:
                    mailbox.take()

        # The first one begins on an idle GPU, which waits for its first launch.
        _, *found = times_us([row, row, loop, row, loop, row, loop, row])
        return median(found[1::2]) / rounds, median(found[::2]) / rounds


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
