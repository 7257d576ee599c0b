"""The full-width benchmark: which points, what becomes of their times, and the goals they are held against."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch

from kdlab.bench.collectives import RECORDED
from kdlab.bench.full_width.point import Measured, NoRoom, Point, measure
from kdlab.bench.full_width.random_pair import check_k26, k26_pair
from kdlab.bench.kernels.ceilings import Ceilings, measure_ceilings
from kdlab.bench.rows import bench_row, read_rows, rows_frame, state_columns
from kdlab.bench.timing import require_gpu
from kdlab.checks import check_float
from kdlab.config import TargetConfig
from kdlab.errors import ArgumentError, UnsupportedDevice
from kdlab.machine import gpu_state, link_facts
from kdlab.model.pair import Pair
from kdlab.model.ranks import Ranks
from kdlab.provenance import run_provenance
from kdlab.study.collectives import MODELLED, AllReduce, collectives_us, fit_all_reduce
from kdlab.study.step_cost import LAUNCH_US, Stage, round_parts, round_stages

ROWS = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128)
_FEW_ROWS = (1, 8, 17, 33, 65)
STREAMS, CONTEXTS, ROUTINGS = (1, 4, 8, 16, 32), (1024, 8192, 32768), (0.8, 1.0)
_JUDGED = ((1, 1024), (1, 8192), *((streams, 1024) for streams in (8, 4, 16, 32)), (8, 8192), (16, 8192))
_TELLING = (*((streams, context, ROUTINGS[0]) for streams, context in _JUDGED), (1, 1024, ROUTINGS[1]))
"""Streams, context and g: what comes first, as time may run out: what has goals, then independent routing."""
_LONG_APART = (CONTEXTS[-1], ROUTINGS[-1])
_LONG_STAGES = tuple(itertools.product((8, 17), (8, 16)))
"""Rows and streams whose stages are timed in longer contexts too: 8 rows fill one tile of attention, 17 take three."""
_WHOLE_STREAMS = (1, 8, 32)
"""Of the points where a rank has whole experts."""
_WHOLE_STAGES = (*((rows, 1) for rows in (1, 9, 33, 65)), (33, 8), (65, 32))
"""Rows and streams of those whose stages are timed."""

Choice = tuple[Point, bool]
"""A point, and whether its stages are timed alone."""
Progress = Callable[[int, int], None]
Keep = Callable[[pd.DataFrame], None]
_KEEP_S = 10.0


@dataclass(frozen=True, slots=True)
class RoundBench:
    """What a run found: rows of ROWS_FORMAT, and what was left out."""

    rows: pd.DataFrame
    messages: tuple[str, ...]


def points() -> list[Choice]:
    """Return every point, the most telling ones first.

    One stream has all numbers of rows, more streams a few. Behind the most telling ones, rows that route independently
    come last, and of each routing several streams in a longer context, where they are left out of the longest: it is
    attention that is long there.
    """
    every = itertools.product(STREAMS, CONTEXTS, ROUTINGS)
    wanted = [(streams, context, g) for streams, context, g in every if streams == 1 or (context, g) != _LONG_APART]
    wanted.sort(key=lambda one: (one[2], one[0] > 1 and one[1] > CONTEXTS[0], one[1]))
    order = dict.fromkeys([*_TELLING, *wanted])
    found = (Point(rows, *one) for one in order for rows in (ROWS if one[0] == 1 else _FEW_ROWS))
    return [(point, _has_stages(point)) for point in found]


def _has_stages(point: Point) -> bool:
    """Say whether a point of sliced experts is timed by stage."""
    is_short = point.streams == 1 or point.context == CONTEXTS[0]
    return point.g < 1.0 and (is_short or (point.rows, point.streams) in _LONG_STAGES)


def slice_points() -> list[tuple[str, list[Choice]]]:
    """Return in stretches what is timed of one slice: how its experts are split, and points.

    Between the most telling points and the others stand those where a rank has whole experts: they need other weights.
    """
    every = points()
    telling = sum(len(ROWS if streams == 1 else _FEW_ROWS) for streams, _, _ in _TELLING)
    whole = [
        (Point(rows, streams, CONTEXTS[0], ROUTINGS[0]), (rows, streams) in _WHOLE_STAGES)
        for streams in _WHOLE_STREAMS
        for rows in (ROWS if streams == 1 else _FEW_ROWS)
    ]
    return [("tp", every[:telling]), ("ep", whole), ("tp", every[telling:])]


def rank_points() -> list[Choice]:
    """Return the points of several GPUs, no stage alone: AR, 9, 33 and 65 rows of 1 and 8 streams, then the others."""
    first = [Point(rows, streams, CONTEXTS[0], ROUTINGS[0]) for streams in (1, 8) for rows in (1, 9, 33, 65)]
    others = [point for point, _ in points() if point.context in CONTEXTS[:2] and point not in first]
    return [(point, False) for point in [*first, *others]]


def bench_round(
    *,
    ranks: int = 8,
    experts: str | None = None,
    running: Ranks | None = None,
    layers: int | None = None,
    seconds: float = 300.0,
    chosen: Sequence[Choice] | None = None,
    progress: Progress | None = None,
    keep: Keep | None = None,
) -> RoundBench:
    """Time rounds of Kimi K2.6 at its true shapes, with random weights: one rank's slice on this GPU, or real ranks.

    One slice runs no collectives: a row of their own holds what `kdlab.study.collectives` lets expect. Real ranks run
    theirs inside the round, and the round once more without them. Routing is planned so that the rows touch
    U = 384 (1 - (1 - 8/384)^(S n^g)) experts a layer.

    Args:
        ranks: whose slice is made; 1 makes whole layers.
        experts: of one slice, "tp" or "ep"; None takes both, as `slice_points` says. Real ranks have theirs
            and refuse the other.
        running: from `init_ranks`: the first slices of `ranks` are made, one each, and these ranks talk to one another;
            every one makes this call. None makes one slice.
        layers: of the target; None takes all 61, which fit one GPU from 8 ranks on.
        seconds: no point is begun after it.
        chosen: points; None takes those of `slice_points()`, of one split `points()`, of real ranks `rank_points()`.
        progress: called with (points done, points in all).
        keep: called with the rows so far now and then: of a run that is ended from outside they are all that is left.

    Raises:
        UnsupportedDevice: no GPU, or no room for the weights.
        torch.OutOfMemoryError: on real ranks, no room inside a round, where the others are.
        ArgumentError: ranks do not divide the model, or an argument is out of range.
    """
    check_k26(ranks, experts, layers, running=1 if running is None else running.size)
    end = time.monotonic() + check_float("seconds", seconds, above=0.0)
    require_gpu("bench round")
    all_reduce = fit_all_reduce(read_rows(RECORDED)) if RECORDED.exists() else MODELLED
    device = torch.device("cuda", torch.cuda.current_device())
    run = _Run(end, measure_ceilings(), all_reduce, device, progress, keep)
    stretches = _stretches(experts, running, chosen)
    run.total = run.left = sum(len(wanted) for _, wanted in stretches)
    for split, wanted in stretches:
        place = Ranks.slice_of(0, ranks, split) if running is None else running.among(ranks)
        if run.is_late(place):
            break
        pair = k26_pair(place, layers, device)
        provenance = run_provenance(
            device=device, dtype=pair.dtype, target_config=pair.target.config, target_sha256=pair.target_sha256,
            drafter_config=None if pair.drafter is None else pair.drafter.config, drafter_sha256=pair.drafter_sha256,
            ranks=ranks, experts=split, graph="graph", impl="auto",
            gpus=ranks - place.missing, **({} if running is None else link_facts(device)),
        )  # fmt: skip
        run.time(pair, wanted, provenance)
        del pair  # there is no room for two
        gc.collect()
        torch.cuda.empty_cache()
    if run.left:
        run.messages.append(f"out of time: {run.left} of {run.total} points left out, the least telling ones")
    return RoundBench(run.table(), tuple(run.messages))


def _stretches(
    experts: str | None, running: Ranks | None, chosen: Sequence[Choice] | None
) -> list[tuple[str, Sequence[Choice]]]:
    if running is not None:
        if experts not in (None, running.experts):
            raise ArgumentError("experts", f"{running.experts!r}, as the running ranks split, or None", repr(experts))
        return [(running.experts, rank_points() if chosen is None else chosen)]
    if chosen is None:
        return list(slice_points()) if experts is None else [(experts, points())]
    return [(split, chosen) for split in (("tp", "ep") if experts is None else (experts,))]


@dataclass(slots=True)
class _Run:
    """What the points of a run share, and what has come of them."""

    end: float
    """On the clock of time.monotonic."""
    ceilings: Ceilings
    all_reduce: AllReduce
    device: torch.device
    progress: Progress | None
    keep: Keep | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    total: int = 0
    left: int = 0
    before: dict[str, Any] = field(init=False)
    """The GPU's state."""
    kept_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.before, self.kept_at = gpu_state(self.device), time.monotonic()

    def table(self) -> pd.DataFrame:
        """Return the rows so far."""
        state = state_columns(self.before, gpu_state(self.device))
        return rows_frame([row | state for row in self.rows])

    def is_late(self, ranks: Ranks) -> bool:
        """Say whether the time is over; ranks agree, the slowest decides."""
        return ranks.largest([time.monotonic() - self.end])[0] > 0.0

    def time(self, pair: Pair, wanted: Sequence[Choice], provenance: dict[str, Any]) -> None:
        """Time points, as many as there is time for."""
        for point, with_stages in wanted:
            if self.is_late(pair.ranks):
                break
            try:
                found = measure(pair, point, stages=with_stages)
                self.rows += _rows(pair, found, self.ceilings, self.all_reduce, provenance)
            except (torch.OutOfMemoryError, UnsupportedDevice) as error:
                if pair.ranks.group is not None and not isinstance(error, NoRoom):
                    raise  # the others are inside the round
                self.messages.append(f"{point}: left out, {str(error).splitlines()[0]}")
            torch.cuda.empty_cache()
            self.left -= 1
            if self.progress is not None:
                self.progress(self.total - self.left, self.total)
            if self.keep is not None and time.monotonic() - self.kept_at >= _KEEP_S:
                self.keep(self.table())
                self.kept_at = time.monotonic()


def _rows(
    pair: Pair, found: Measured, ceilings: Ceilings, all_reduce: AllReduce, provenance: dict[str, Any]
) -> list[dict[str, Any]]:
    config = pair.target.config
    drafter = None if found.point.rows == 1 or pair.drafter is None else pair.drafter.config
    floors = {stage.name: _floor_us(stage, ceilings) for stage in round_stages(config, drafter, found.step)}
    columns: dict[str, Any] = {
        "provenance": provenance,
        "simulated": True,
        "method": "ar" if found.point.rows == 1 else "ddtree",
        "setting": float(found.point.rows - 1),
        "rows": found.point.rows,
        "streams": found.point.streams,
        "context": found.point.context,
    }
    gpus = pair.ranks.size - pair.ranks.missing
    case = found.case | {"layers": config.num_hidden_layers, "gpus": gpus}
    note = "one CUDA graph" if not found.alone else f"one CUDA graph, collectives of {gpus} of {pair.ranks.size} ranks"
    rows = [
        bench_row("round", "round", "us", case=case, samples=found.whole, note=note, **columns),
        bench_row("round", "floor", "us", case=case, value=sum(floors.values()), **columns),
        bench_row("round", "loop", "us", case=case, value=found.loop_us, note="launch, copy, read", **columns),
        bench_row("round", "row", "us", case=case, value=found.row_us, note="launches in a row", **columns),
    ]
    if found.alone:
        note = "the round without its collectives"
        rows.append(bench_row("round", "slice", "us", case=case, samples=found.alone, note=note, **columns))
    else:
        us = collectives_us(config, drafter, found.step, all_reduce=all_reduce)
        note = all_reduce.source(found.step.ranks)
        rows.append(bench_row("round", "collectives", "us", case=case, value=us, note=note, **columns))
    for metric, words, samples, floor in _alone(config, found, floors, ceilings):
        rows.append(bench_row("round", metric, "us", case=case | words, samples=samples, **columns))
        if floor is not None:
            rows.append(bench_row("round", f"{metric} floor", "us", case=case | words, value=floor, **columns))
    return rows


def _alone(
    config: TargetConfig, found: Measured, floors: dict[str, float], ceilings: Ceilings
) -> Iterator[tuple[str, dict[str, str], list[float], float | None]]:
    """Yield metric, words of the case, samples and floor of every stage and part of one that was timed."""
    for name, samples in found.stages.items():
        yield "stage", {"stage": name}, samples, floors.get(name)
    parts = {part.name: (inside, part) for inside, part in round_parts(config, found.step)}
    for name, samples in found.parts.items():
        inside, part = parts[name]
        yield "part", {"stage": inside, "part": name}, samples, _floor_us(part, ceilings)


def _floor_us(stage: Stage, ceilings: Ceilings) -> float:
    rates = {"bytes_per_s": 1e12 * ceilings["read"], "flops_per_s": 1e12 * ceilings["matrix"]}
    return stage.floor_us(**rates, launch_us=LAUNCH_US)
