"""What notebook 50 and the pages rest on: recorded rounds and all-reduces as a cost, recorded acceptance as a line."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kdlab.bench.rows import read_rows
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError
from kdlab.paths import DATA, K26_SHAPES
from kdlab.study.collectives import MODELLED, experts_are_products, fit_all_reduce, with_waits
from kdlab.study.compare import check_comparable
from kdlab.study.phase import BEST, COMPARISONS, Rivals, RoundCost, phase_table
from kdlab.study.recorded_rounds import read_rounds, recorded_step
from kdlab.study.step_cost import all_reduces
from kdlab.study.step_fit import fit_rounds, fitted_points, floor_fit
from kdlab.study.sweep_file import load_sweeps
from kdlab.study.workloads import Line, Profile, Workload

RECORDED = DATA / "recorded"
FILES = {
    "rounds": RECORDED / "rounds-h200.parquet",
    "reduces": RECORDED / "all-reduce-h200.parquet",
    "several": RECORDED / "rounds-2gpu.parquet",
    "whole": RECORDED / "rounds-8gpu.parquet",
    "acceptance": RECORDED / "mini-acceptance.parquet",
}
TEMPERATURE = 0.6
"""Of the text on the line: no kind loops there, and Kimi K2.6 is run at it without thinking."""
TREES_ALIKE = 0.05
"""How much lower g may be between rows of a tree than of a chain: about what the mini's are at 8 rows (notebook 50)."""
SLOW_REDUCE_US = 20.0
"""What a small all-reduce over 8 GPUs may take."""
OTHER_TEMPERATURE = 1.0
"""That of Kimi K2.6 with thinking."""
G = tuple(np.round(np.arange(0.7, 1.001, 0.05), 2).tolist())
STREAMS, CONTEXTS, NUM_PLACES = (1, 4, 8, 16, 32), (1024, 8192, 32768), 9


@dataclass(frozen=True, eq=False)
class Evidence:
    """Both halves of a speed on Kimi K2.6.

    Attributes:
        cost: of a round, fitted to recorded rounds; at the floors where there are none.
        floor: the same with every stage at its floor.
        points: recorded times beside their fits; None without recorded rounds.
        several: recorded whole rounds of several GPUs, the whole model's among them, in the same columns; None without.
        sweeps: recorded acceptance, every temperature.
        line: its kinds of text at one temperature, loops left out.
        provenance: of the rounds; empty without.
        missing: a line a file that is not there.
    """

    cost: RoundCost
    floor: RoundCost
    points: pd.DataFrame | None
    several: pd.DataFrame | None
    sweeps: pd.DataFrame
    line: Line
    provenance: Mapping[str, Any]
    missing: tuple[str, ...]

    @property
    def notes(self) -> list[str]:
        """What every figure of times has to say."""
        if not self.cost.fit.measured:
            return ["NOT MEASURED: every stage at its floor, collectives on top"]
        reduces = self.cost.fit.all_reduce.source(self.cost.ranks)
        return [f"round times fitted to recorded ones, one rank's slice, random weights; collectives {reduces}"]

    @property
    def num_prompts(self) -> int:
        """Fewest prompts of a kind on the line."""
        return min(profile.tokens.shape[1] for profile in self.line.profiles)

    def works(self, places: Iterable[float] | None = None) -> dict[float, Workload]:
        """Return workloads by place: given ones, or NUM_PLACES from the hardest kind of text to the easiest."""
        ends = self.line.places()
        chosen = np.linspace(float(ends[0]), float(ends[-1]), NUM_PLACES).tolist() if places is None else places
        return {place: self.line.at(place) for place in chosen}

    def phases(
        self,
        cost: RoundCost | None = None,
        *,
        comparisons: Mapping[str, Rivals] = COMPARISONS,
        num_resamples: int = 500,
    ) -> pd.DataFrame:
        """Return the region that the answer is about: every text, G, STREAMS and CONTEXTS, see `phase_table`.

        Args:
            cost: of a round; None takes the fitted one.
            comparisons: which trees against which controls.
            num_resamples: of the intervals.
        """
        grid: dict[str, Any] = {"g": G, "streams": STREAMS, "contexts": CONTEXTS}
        grid |= {"comparisons": comparisons, "num_resamples": num_resamples}
        return phase_table(self.works(), cost or self.cost, **grid)

    def what_ifs(self, *, num_resamples: int = 500) -> dict[str, tuple[str, pd.DataFrame]]:
        """Return the region of BEST under other assumptions: {name: (the assumption in words, of `phases`)}.

        Floors are among them only where the region itself does not stand on them.
        """
        reduce = self.cost.fit.all_reduce
        slower = replace(reduce, base_us=SLOW_REDUCE_US - reduce.wait_us, hop_us=0.0)
        slow = replace(self.cost.fit, all_reduce=slower)
        now = reduce.us(self.cost.ranks, 0.0)
        others = {
            "Trees whose rows are more alike than a chain's": (
                f"g lower by {TREES_ALIKE:g} for trees alone",
                replace(self.cost, trees_alike=TREES_ALIKE),
            ),
            **({"Faster kernels": ("every stage at its floor", self.floor)} if self.cost.fit.measured else {}),
            "Slower collectives": (
                f"{SLOW_REDUCE_US:g} us for a small all-reduce inside a round instead of {now:.1f}",
                replace(self.cost, fit=slow),
            ),
        }
        asked: dict[str, Any] = {"comparisons": {"best": BEST}, "num_resamples": num_resamples}
        found = {name: (words, self.phases(cost, **asked)) for name, (words, cost) in others.items()}
        other = replace(self, line=_line(self.sweeps, OTHER_TEMPERATURE)).phases(**asked)
        return found | {"Other text": (f"the mini's text drawn at temperature {OTHER_TEMPERATURE:g}", other)}


def load_evidence(
    files: Mapping[str, str | os.PathLike[str]] | None = None,
    *,
    temperature: float = TEMPERATURE,
    experts: str = "tp",
    ranks: int = 8,
) -> Evidence:
    """Read what is recorded; what is not there is named, and modelled or left out.

    Args:
        files: other paths than those of `FILES`, by its names.
        temperature: of the text on the line, one of the recorded acceptance.
        experts, ranks: how the rounds are split.

    Raises:
        FileNotFoundError: there is no acceptance.
        ArgumentError: it has no such temperature.
        ComparisonError: rounds of different cards or commits, or all-reduces of another GPU than the rounds'.
    """
    paths = {name: Path(path) for name, path in (FILES | dict(files or {})).items()}
    target, drafter = TargetConfig.load(K26_SHAPES / "target"), DrafterConfig.load(K26_SHAPES / "drafter")
    missing = [f"no {paths[name].name}: {words}" for name, words in _WITHOUT.items() if not paths[name].exists()]
    reduces = fit_all_reduce(read_rows(paths["reduces"])) if paths["reduces"].exists() else MODELLED
    found = [paths[name] for name in ("several", "whole") if paths[name].exists()]
    several = read_rows(*found) if found else None
    if several is not None and reduces.measured_ranks:
        reduces = with_waits(reduces, several, target, drafter)
    fit, points, provenance = floor_fit(target, drafter, reduces), None, {}
    floor = RoundCost(fit, target, drafter, ranks, experts)
    if paths["rounds"].exists():
        rows = read_rows(paths["rounds"])
        recorded = read_rounds(rows, target, drafter, ranks=ranks)
        fit = fit_rounds(recorded, all_reduce=reduces)
        floor = replace(floor, fit=replace(floor.fit, seen=fit.seen))  # the same points are compared
        points, provenance = fitted_points(recorded, fit), json.loads(rows["provenance"].iloc[0])
    check_comparable([{"gpu": gpu} for gpu in _gpus(paths)], fields=("gpu",))
    cost = RoundCost(fit, target, drafter, ranks, experts)
    compared = None if several is None else _several(several, cost)
    sweeps = load_sweeps(paths["acceptance"])
    return Evidence(cost, floor, points, compared, sweeps, _line(sweeps, temperature), provenance, tuple(missing))


_WITHOUT = {
    "rounds": "no round is recorded, every stage stands at its floor (kdlab bench round records them on an H200)",
    "reduces": "collectives are modelled",
}


def _gpus(paths: Mapping[str, Path]) -> list[str]:
    files = [paths[name] for name in ("rounds", "reduces", "several", "whole") if paths[name].exists()]
    return [str(name) for path in files for name in read_rows(path)["gpu"].unique()]


def _line(sweeps: pd.DataFrame, temperature: float) -> Line:
    text = sweeps[(sweeps["temperature"] == temperature) & ~sweeps["loop"]]
    if text.empty:
        raise ArgumentError("temperature", f"one of {sorted(sweeps['temperature'].unique())}", temperature)
    return Line.of({str(kind): Profile.of(rows, str(kind)) for kind, rows in text.groupby("kind", sort=False)})


def _several(rows: pd.DataFrame, cost: RoundCost) -> pd.DataFrame:
    """Whole rounds of several GPUs beside fit and collectives: shapes of one rank of `ranks`, run by `gpus` of them."""
    found = []
    for text, metric, us in zip(rows["case"], rows["metric"], rows["value"], strict=True):
        case = json.loads(text)
        if metric != "round" or case["ranks"] != cost.ranks:
            continue
        drafter = cost.drafter if case["rows"] > 1 else None
        point = {"g": case["g"], "streams": case["streams"], "context": case["context"]}
        split = replace(cost, experts=case["experts"])
        whole = split.time(case["rows"], drafts=drafter is not None, **point).whole_us
        step = recorded_step(case, cost.target)
        calls, moved = all_reduces(cost.target, drafter, step)
        products = experts_are_products(cost.target, step)
        fitted = whole + cost.fit.all_reduce.us(case["gpus"], moved, calls=calls, products=products)
        known = {"rows": case["rows"], **point, "experts": case["experts"], "gpus": case["gpus"]}
        found.append(known | {"measured_us": us, "fitted_us": fitted})
    names = ["rows", "g", "streams", "context", "experts", "gpus", "measured_us", "fitted_us"]
    table = pd.DataFrame(found, columns=names)
    return table.assign(residual=table["fitted_us"] / table["measured_us"] - 1.0)
