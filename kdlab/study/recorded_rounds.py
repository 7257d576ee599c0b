"""Recorded rounds of `kdlab bench round`, with the bytes and operations of what each of them did."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError
from kdlab.kernels.cost import Cost
from kdlab.study.compare import check_table
from kdlab.study.step_cost import Stage, Step, round_stages

OTHER = "other"
OTHER_STAGE = Stage(OTHER, Cost(0), 1)
"""What a round launches outside of every stage: it moves nothing, and counts as one launch."""
_KEY = ("rows", "streams", "context", "g", "ranks", "experts", "layers")
_ONE_RUN = ("gpu", "gpu_uuid", "commit", "graph", "impl", "dtype", "driver", "torch")

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class StageTime:
    """One measured stage: its counts and the microseconds that all its calls took; `key` is the round's, in `_KEY`."""

    stage: Stage
    us: float
    key: Key = ()


@dataclass(frozen=True, slots=True)
class WholeTime:
    """One measured whole round: the stages it holds, and its microseconds."""

    stages: tuple[Stage, ...]
    us: float
    key: Key

    @property
    def rows(self) -> int:
        """Verified a stream."""
        return int(self.key[0])

    @property
    def streams(self) -> int:
        """S."""
        return int(self.key[1])

    @property
    def context(self) -> int:
        """Committed rows of each stream."""
        return int(self.key[2])

    @property
    def experts(self) -> str:
        """How they are split over ranks."""
        return str(self.key[5])

    @property
    def tokens(self) -> int:
        """T, rows of all streams."""
        return self.rows * self.streams


@dataclass(frozen=True, slots=True)
class RecordedRounds:
    """What one run measured: stages alone, and whole rounds without collectives."""

    stages: tuple[StageTime, ...]
    wholes: tuple[WholeTime, ...]


def read_rounds(
    rows: pd.DataFrame, target: TargetConfig, drafter: DrafterConfig, *, ranks: int = 8
) -> RecordedRounds:
    """Read the rounds of one rank's slice, experts split in either way: one fit, as the kernels are the same.

    Args:
        rows: result rows of `kdlab bench round`; those of other ops or ranks are passed over.
        target, drafter: constants of the models whose rounds were timed.
        ranks: over which they were split.

    Raises:
        ArgumentError: no such row, or a stage that the model's rounds do not have.
        ComparisonError: rows of different cards, commits or versions.
    """
    cases = [json.loads(text) for text in rows["case"]]
    wanted = [op == "round" and case.get("ranks") == ranks for op, case in zip(rows["op"], cases, strict=True)]
    chosen = rows[np.array(wanted, dtype=bool)]  # an empty list would choose no columns
    check_table(chosen, fields=_ONE_RUN)
    stages: list[StageTime] = []
    wholes: list[WholeTime] = []
    for metric, text, us in zip(chosen["metric"], chosen["case"], chosen["value"], strict=True):
        case = json.loads(text)
        key = tuple(case[name] for name in _KEY)
        known = _stages_of(key, target, drafter)
        if metric == "round":
            wholes.append(WholeTime(tuple(known.values()), float(us), key))
        elif metric == "stage":
            if case["stage"] not in known:
                raise ArgumentError("rows", "stages of the model's rounds", repr(case["stage"]))
            stages.append(StageTime(known[case["stage"]], float(us), key))
    for name, found in (("whole rounds", wholes), ("a round's stages", stages)):
        if not found:
            raise ArgumentError("rows", f"times of {name}, {ranks} ranks", "none")
    return RecordedRounds(tuple(stages), tuple(wholes))


def recorded_step(case: Mapping[str, Any], target: TargetConfig) -> Step:
    """Return what a recorded round was asked for: random weights accept nothing, it commits its bonus token alone.

    Args:
        case: of a result row.
        target: constants.
    """
    rows, point = case["rows"], {name: case[name] for name in ("streams", "context", "ranks", "experts")}
    return Step.routed(target, rows, case["g"], **point, top_k=max(1, rows - 1), committed=1)


@lru_cache(maxsize=1024)
def _stages_of(key: Key, target: TargetConfig, drafter: DrafterConfig) -> Mapping[str, Stage]:
    case = dict(zip(_KEY, key, strict=True))
    model = replace(target, num_hidden_layers=case["layers"])
    stages = round_stages(model, drafter if case["rows"] > 1 else None, recorded_step(case, target))
    return {stage.name: stage for stage in (*stages, OTHER_STAGE)}
