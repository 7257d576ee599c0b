"""Round times from the stages of `step_cost`: fitted to recorded rounds, then any step on any GPU.

A stage takes slope * (the longer of its bytes' and its operations' time) + rest * (the shorter of them) + a price a
launch + a price a part: a perfect kernel has a slope of 1 and hides the shorter one. The numbers are fitted to the
times of one GPU by least squares of the relative error, the slope at least 1 (which leaves to the launches nothing that
is bytes, where weights are all that a stage reads), the others at least 0. Attention alone has parts, and no rest: with
a rest, one row of 16 streams at 32k, no stage of which was timed, comes out too long by 10 %. It goes by operations
of whole tiles: by those of used rows alone, that round is too long by 22 % and 17 rows of as many streams (136 of 192
pairs) are too short by a seventh; their attention, timed alone, by a third.
A whole round takes scale * the sum of its stages + a fixed time, fitted to whole rounds alike. What it is still off by
depends on the rows of all streams, with or without a drafter, and on how experts are split, and is put right by rounds
of the same: kernels change their ways with these. Before that, rounds of whole experts come out too short by 10 % at
one row, too long by 6 % at 2,080 (their experts by 30 %, by 4 %). Two fits of experts, below and from the rows on that
go by products of matrices, leave one row of whole ones too short by 29 %, and rounds that are put right farther off
(2.1 % instead of 1.8).
Collectives come on top, see `collectives`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError
from kdlab.study.collectives import MODELLED, AllReduce, collectives_us
from kdlab.study.gpus import MEASURED_H200, Gpu
from kdlab.study.recorded_rounds import OTHER, OTHER_STAGE, RecordedRounds, StageTime, WholeTime
from kdlab.study.step_cost import LAUNCH_US, Stage, Step, round_stages

WHOLE = "whole round"
"""What tables of stages call the round itself."""


@dataclass(frozen=True, slots=True)
class StageFit:
    """us = slope * longer + rest * shorter + launch_us * launches + part_us * parts: of bytes' and operations' times.

    Attributes:
        residuals: (fitted - measured) / measured, a point each.
        tiles: a stage computes whole tiles; a floor does not.
    """

    slope: float
    rest: float
    launch_us: float
    residuals: tuple[float, ...] = ()
    part_us: float = 0.0
    tiles: bool = True

    def us(self, stage: Stage, gpu: Gpu) -> float:
        """Return the microseconds of a stage on a GPU, whose kernels are taken to be as good as the fitted ones."""
        shorter, longer = _work_us(stage, gpu, self.tiles)
        work = self.slope * longer + self.rest * shorter
        return work + self.launch_us * stage.launches + self.part_us * stage.parts


@dataclass(frozen=True, slots=True)
class Correction:
    """Measured over fitted, by rows of all streams; in between linear in the logarithm of the rows."""

    rows: tuple[int, ...]
    factors: tuple[float, ...]

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]]) -> "Correction":
        """Take the median where several (rows, measured over fitted) have the same rows."""
        known = sorted({rows for rows, _ in points})
        medians = [float(np.median([factor for rows, factor in points if rows == one])) for one in known]
        return cls(tuple(known), tuple(medians))

    def at(self, rows: int) -> float:
        """Return the factor; beyond both ends that of the end, 1 where nothing was measured."""
        return float(np.interp(np.log(rows), np.log(self.rows), self.factors)) if self.rows else 1.0


@dataclass(frozen=True, slots=True)
class RoundFit:
    """How long rounds take.

    Attributes:
        stages: by name.
        scale, extra_us: a whole round takes scale * the sum of its stages + extra_us.
        residuals: (fitted - measured) / measured, a whole round each, before it is put right.
        corrections: by whether a drafter runs and how experts are split.
        checked: what each whole round is off by when it is put right by those of other shapes alone.
        all_reduce: of collectives.
        measured: False where the stages stand at their floors, see `floor_fit`.
        seen: (streams, context) of the recorded rounds; none: no point is farther from them than another.
    """

    stages: Mapping[str, StageFit]
    scale: float = 1.0
    extra_us: float = 0.0
    residuals: tuple[float, ...] = ()
    corrections: Mapping[tuple[bool, str], Correction] = field(default_factory=dict)
    checked: tuple[float, ...] = ()
    all_reduce: AllReduce = MODELLED
    measured: bool = True
    seen: frozenset[tuple[int, int]] = frozenset()

    def covers(self, streams: int, context: int) -> bool:
        """Whether as many streams at as long a context were recorded; anything is, where nothing was."""
        return not self.seen or any(count >= streams and rows >= context for count, rows in self.seen)

    @property
    def most_rows(self) -> float:
        """Rows of all streams in the largest fitted round; infinite where nothing was measured."""
        return max((rows for right in self.corrections.values() for rows in right.rows), default=float("inf"))

    @property
    def error(self) -> float:
        """How far a whole round is typically off: the median size of `checked`; 0 where nothing was measured."""
        return float(np.median(np.abs(self.checked))) if self.checked else 0.0

    def whole_us(self, stages_us: float, tokens: int, *, drafts: bool, experts: str) -> float:
        """Return the microseconds of a whole round, put right.

        Args:
            stages_us: of all its stages together.
            tokens: rows of all streams.
            drafts: the drafter runs.
            experts: how they are split; rounds of a way that was not recorded are not put right.
        """
        right = self.corrections.get((drafts, experts))
        return (self.scale * stages_us + self.extra_us) * (right.at(tokens) if right else 1.0)


@dataclass(frozen=True, slots=True)
class RoundTime:
    """A round on a GPU.

    Attributes:
        stages: microseconds by stage, each alone.
        whole_us: the round without collectives.
        collectives_us: of the all-reduces.
        predicted: the GPU is not the one that was measured.
    """

    stages: Mapping[str, float]
    whole_us: float
    collectives_us: float
    predicted: bool

    @property
    def us(self) -> float:
        """Microseconds of the whole round, collectives included."""
        return self.whole_us + self.collectives_us


def fit_stages(points: Iterable[StageTime], gpu: Gpu = MEASURED_H200) -> dict[str, StageFit]:
    """Fit every stage that was measured.

    Args:
        points: measured stages, several a name.
        gpu: what they were measured on, with its reached rates.

    Raises:
        ArgumentError: a time is not above 0, or there is no point.
    """
    by_name: dict[str, list[StageTime]] = {}
    for point in points:
        if not 0 < point.us < np.inf:
            raise ArgumentError("us", f"a time above 0 for {point.stage.name}", point.us)
        by_name.setdefault(point.stage.name, []).append(point)
    if not by_name:
        raise ArgumentError("points", "at least one", "none")
    return {name: _fit(found, gpu) for name, found in by_name.items()}


def fit_rounds(recorded: RecordedRounds, gpu: Gpu = MEASURED_H200, all_reduce: AllReduce = MODELLED) -> RoundFit:
    """Fit recorded rounds: every stage, then whole rounds to the sums of their fitted stages.

    Args:
        recorded: of `read_rounds`.
        gpu: what they were measured on.
        all_reduce: of the collectives, which are in no recorded round of one GPU.
    """
    stages = fit_stages(recorded.stages, gpu)
    sums = np.array([sum(stages[stage.name].us(stage, gpu) for stage in one.stages) for one in recorded.wholes])
    us = np.array([one.us for one in recorded.wholes])
    (scale, extra_us), residuals = _relative_fit(np.stack([sums, np.ones(len(us))], axis=1), us, np.zeros(2))
    points: dict[tuple[bool, str], list[tuple[WholeTime, float]]] = {}
    for one, off in zip(recorded.wholes, residuals, strict=True):
        points.setdefault((one.rows > 1, one.experts), []).append((one, 1.0 / (1.0 + off)))
    corrections = {kind: _correction(found) for kind, found in points.items()}
    checked = tuple(off for found in points.values() for off in _left_out_errors(found))
    seen = frozenset((one.streams, one.context) for one in recorded.wholes)
    return RoundFit(stages, scale, extra_us, residuals, corrections, checked, all_reduce, seen=seen)


def _correction(points: Iterable[tuple[WholeTime, float]]) -> Correction:
    return Correction.of([(one.tokens, factor) for one, factor in points])


def _left_out_errors(points: Sequence[tuple[WholeTime, float]]) -> list[float]:
    """What each round is off by when those of other rows, streams or context put it right."""
    found = []
    for one, factor in points:
        others = _correction(other for other in points if other[0].key[:3] != one.key[:3])
        found.append(others.at(one.tokens) / factor - 1.0)
    return found


def floor_fit(target: TargetConfig, drafter: DrafterConfig, all_reduce: AllReduce = MODELLED) -> RoundFit:
    """Return rounds whose stages stand at their floors, which no kernel beats; they stand in for times not recorded.

    Args:
        target, drafter: constants, whose rounds' stages are named.
        all_reduce: of the collectives.
    """
    stages = round_stages(target, drafter, Step(2, 2.0 * target.num_experts_per_tok))
    at_floor = {stage.name: StageFit(1.0, 0.0, LAUNCH_US, tiles=False) for stage in stages}
    return RoundFit(at_floor, all_reduce=all_reduce, measured=False)


def round_time(
    fit: RoundFit, target: TargetConfig, drafter: DrafterConfig | None, step: Step, gpu: Gpu = MEASURED_H200
) -> RoundTime:
    """Return the time of a round.

    Args:
        fit: of `fit_rounds` or `floor_fit`.
        target, drafter: constants; no drafter for AR.
        step: what is asked.
        gpu: MEASURED_H200, or one of `carried_over`: a prediction.

    Raises:
        ArgumentError: a stage has no fit.
    """
    stages = round_stages(target, drafter, step)
    if OTHER in fit.stages:
        stages = (*stages, OTHER_STAGE)
    missing = [stage.name for stage in stages if stage.name not in fit.stages]
    if missing:
        raise ArgumentError("fit", "every stage of the round", f"none for {', '.join(missing)}")
    times = {stage.name: fit.stages[stage.name].us(stage, gpu) for stage in stages}
    whole = fit.whole_us(sum(times.values()), step.tokens, drafts=drafter is not None, experts=step.experts)
    return RoundTime(times, whole, collectives_us(target, drafter, step, gpu, fit.all_reduce), gpu.predicted)


def fit_table(fit: RoundFit) -> pd.DataFrame:
    """Return one row a stage: slope, rest, launch_us, part_us, points, residual_median, residual_worst (absolute).

    The last row is of whole rounds: its slope is their scale, its launch_us what they take beside it.
    """
    whole = StageFit(fit.scale, 0.0, fit.extra_us, fit.residuals)
    return pd.DataFrame([_fit_row(name, one) for name, one in [*fit.stages.items(), (WHOLE, whole)]])


def fitted_points(recorded: RecordedRounds, fit: RoundFit, gpu: Gpu = MEASURED_H200) -> pd.DataFrame:
    """Return every recorded time beside its fit, before whole rounds are put right.

    Returns:
        rows, streams, context, g, experts, stage (WHOLE for whole ones), measured_us, fitted_us, residual.
    """
    found = []
    for point in recorded.stages:
        us = fit.stages[point.stage.name].us(point.stage, gpu)
        found.append((*point.key[:4], point.key[5], point.stage.name, point.us, us))
    for one in recorded.wholes:
        total = sum(fit.stages[stage.name].us(stage, gpu) for stage in one.stages)
        found.append((*one.key[:4], one.key[5], WHOLE, one.us, fit.scale * total + fit.extra_us))
    names = ["rows", "streams", "context", "g", "experts", "stage", "measured_us", "fitted_us"]
    return pd.DataFrame(found, columns=names).assign(residual=lambda t: t["fitted_us"] / t["measured_us"] - 1.0)


def _fit(points: list[StageTime], gpu: Gpu) -> StageFit:
    stages = [point.stage for point in points]
    terms = np.array([[*_work_us(stage, gpu), stage.launches, stage.parts] for stage in stages], dtype=np.float64)
    least = np.array([0.0, 1.0, 0.0, 0.0])
    (rest, slope, launch_us, part_us), residuals = _relative_fit(terms, np.array([point.us for point in points]), least)
    return StageFit(slope, rest, launch_us, residuals, part_us)


def _relative_fit(terms: np.ndarray, us: np.ndarray, least: np.ndarray) -> tuple[list[float], tuple[float, ...]]:
    """Least squares of (terms @ x - us) / us with no x below `least`: x, and those residuals."""
    found = least + nnls(terms / us[:, None], 1.0 - terms @ least / us)[0]
    return found.tolist(), tuple((terms @ found / us - 1.0).tolist())


def _fit_row(name: str, one: StageFit) -> dict[str, Any]:
    sizes = np.abs(one.residuals) if one.residuals else np.array([np.nan])
    found = {"residual_median": float(np.median(sizes)), "residual_worst": float(np.max(sizes))}
    prices = {"slope": one.slope, "rest": one.rest, "launch_us": one.launch_us, "part_us": one.part_us}
    return {"stage": name, **prices, "points": len(one.residuals), **found}


def _work_us(stage: Stage, gpu: Gpu, tiles: bool = True) -> tuple[float, float]:
    """The shorter and the longer of the times that a stage's bytes and operations take; 0 for one that it hides."""
    moved = 1e6 * stage.cost.bytes / gpu.bytes_per_s
    computed = 1e6 * ((stage.tiled if tiles else 0.0) or stage.cost.flops) / gpu.flops_per_s
    return 0.0 if stage.hides else min(moved, computed), max(moved, computed)
