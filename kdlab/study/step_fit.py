"""Round times from the stages of `step_cost`: each stage fitted to measured times, then any step on any GPU.

A stage takes slope * (the longer of its bytes' and its operations' time) + a price a launch. Both numbers are fitted to
the times of one GPU, none below zero, by least squares of the relative error, and say how far its kernels are from the
machine. Collectives are modelled until they are measured: a fixed time a call and the ring's bytes over the link.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError
from kdlab.kernels.cost import Cost
from kdlab.study.gpus import MEASURED_H200, Gpu
from kdlab.study.step_cost import Stage, Step, all_reduces, round_stages

ALL_REDUCE_US = 8.0
"""A small all-reduce over NVLink in a graph; modelled."""
OTHER = "other"
_OTHER_STAGE = Stage(OTHER, Cost(0), 1)


@dataclass(frozen=True, slots=True)
class StageTime:
    """One measured stage: its counts and the microseconds that all its calls took."""

    stage: Stage
    us: float


@dataclass(frozen=True, slots=True)
class StageFit:
    """us = slope * work_us + launch_us * launches; `residuals` are (fitted - measured) / measured, a point each."""

    slope: float
    launch_us: float
    residuals: tuple[float, ...]

    def us(self, stage: Stage, gpu: Gpu) -> float:
        """Return the microseconds of a stage on a GPU, whose kernels are taken to be as good as the fitted ones."""
        return self.slope * _work_us(stage, gpu) + self.launch_us * stage.launches


@dataclass(frozen=True, slots=True)
class RoundTime:
    """A round on a GPU.

    Attributes:
        stages: microseconds by stage.
        collectives_us: of the all-reduces, modelled.
        predicted: the GPU is not the one that was measured.
    """

    stages: Mapping[str, float]
    collectives_us: float
    predicted: bool

    @property
    def us(self) -> float:
        """Microseconds of the whole round."""
        return sum(self.stages.values()) + self.collectives_us


def stage_times(rows: pd.DataFrame, target: TargetConfig, drafter: DrafterConfig) -> list[StageTime]:
    """Read the stages of recorded rounds.

    Args:
        rows: result rows of `kdlab bench round`; others among them are passed over.
        target, drafter: constants of the models whose rounds were timed.

    Returns:
        One entry a row with a stage's time. What a round launches outside of every stage is the stage OTHER: it moves
        nothing, and counts as one launch.

    Raises:
        ArgumentError: no such row, or a stage that the model's rounds do not have.
    """
    timed = rows[(rows["op"] == "round") & (rows["metric"] == "stage")]
    if timed.empty:
        raise ArgumentError("rows", "times of a round's stages", "none")
    found = []
    for text, us in zip(timed["case"], timed["value"], strict=True):
        case = json.loads(text)
        known = _stages_of(_key_of(case), target, drafter)
        if case["stage"] not in known:
            raise ArgumentError("rows", "stages of the model's rounds", repr(case["stage"]))
        found.append(StageTime(known[case["stage"]], float(us)))
    return found


def _key_of(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what of a recorded case its stages depend on."""
    return tuple(case[name] for name in ("rows", "streams", "context", "g", "ranks", "experts", "layers"))


@lru_cache(maxsize=1024)
def _stages_of(key: tuple[Any, ...], target: TargetConfig, drafter: DrafterConfig) -> Mapping[str, Stage]:
    rows, streams, context, g, ranks, experts, layers = key
    split = {"context": context, "ranks": ranks, "experts": experts}
    step = Step.routed(target, rows, g, streams=streams, **split, top_k=max(1, rows - 1), committed=1)
    stages = round_stages(replace(target, num_hidden_layers=layers), drafter if rows > 1 else None, step)
    return {stage.name: stage for stage in (*stages, _OTHER_STAGE)}


def _work_us(stage: Stage, gpu: Gpu) -> float:
    return stage.cost.floor_us(bytes_per_s=gpu.bytes_per_s, flops_per_s=gpu.flops_per_s)


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


def _fit(points: list[StageTime], gpu: Gpu) -> StageFit:
    us = np.array([point.us for point in points])
    terms = np.array([[_work_us(point.stage, gpu), point.stage.launches] for point in points], dtype=np.float64)
    (slope, launch_us), _ = nnls(terms / us[:, None], np.ones(len(us)))
    residuals = terms @ np.array([slope, launch_us]) / us - 1.0
    return StageFit(float(slope), float(launch_us), tuple(residuals.tolist()))


def round_time(
    fits: Mapping[str, StageFit], target: TargetConfig, drafter: DrafterConfig | None, step: Step, gpu: Gpu
) -> RoundTime:
    """Return the time of a round: fitted stages, and modelled collectives.

    Args:
        fits: of `fit_stages`, every stage of the round among them.
        target, drafter: constants; no drafter for AR.
        step: what is asked.
        gpu: MEASURED_H200, or one of `carried_over`: a prediction.

    Raises:
        ArgumentError: a stage has no fit.
    """
    stages = round_stages(target, drafter, step)
    if OTHER in fits:
        stages = (*stages, _OTHER_STAGE)
    missing = [stage.name for stage in stages if stage.name not in fits]
    if missing:
        raise ArgumentError("fits", "every stage of the round", f"none for {', '.join(missing)}")
    calls, moved = all_reduces(target, drafter, step)
    ring = 2.0 * (step.ranks - 1) / step.ranks * moved / gpu.link_bytes_per_s
    return RoundTime(
        {stage.name: fits[stage.name].us(stage, gpu) for stage in stages},
        ALL_REDUCE_US * calls + 1e6 * ring,
        predicted=gpu.name != MEASURED_H200.name,
    )


def fit_table(fits: Mapping[str, StageFit]) -> pd.DataFrame:
    """Return one row a stage: slope, launch_us, points, and the median and worst absolute residual."""
    rows = [
        {
            "stage": name,
            "slope": fit.slope,
            "launch_us": fit.launch_us,
            "points": len(fit.residuals),
            "residual_median": float(np.median(np.abs(fit.residuals))),
            "residual_worst": float(np.max(np.abs(fit.residuals))),
        }
        for name, fit in fits.items()
    ]
    return pd.DataFrame(rows)
