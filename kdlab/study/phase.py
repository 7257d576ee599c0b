"""Does a tree pay? Recorded acceptance over the fitted cost of a K2.6 round, over routing, streams and context.

Both halves come from elsewhere: acceptance of a sweep (rounds by their verified rows, tokens per round), cost of
`step_fit`. A tree pays where its tokens per second pass those of the best control: AR, every chain and every adaptive
chain, which are free to choose their length at each point.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pandas as pd

from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError
from kdlab.study.gpus import MEASURED_H200, Gpu
from kdlab.study.step_cost import Step
from kdlab.study.step_fit import StageFit, round_time

_NEEDED = ("method", "setting", "tokens_per_round", "rounds_by_rows")
_TREES = ("ddtree", "beam")


@dataclass(frozen=True, eq=False)
class RoundCost:
    """The time of a round of one model on one machine.

    Attributes:
        fits: of `fit_stages`.
        target, drafter: constants of the models.
        ranks, experts: how they are split.
        gpu: MEASURED_H200, or one of `carried_over`.
    """

    fits: Mapping[str, StageFit]
    target: TargetConfig
    drafter: DrafterConfig
    ranks: int = 8
    experts: str = "tp"
    gpu: Gpu = MEASURED_H200
    _known: dict[tuple[int, bool, float, int, int], float] = field(default_factory=dict)

    def us(self, rows: int, *, drafts: bool, g: float, streams: int, context: int) -> float:
        """Return microseconds of a round.

        Args:
            rows: verified a stream.
            drafts: the drafter runs; AR does without.
            g: exponent of correlated routing within a stream.
            streams, context: S and committed rows of each.
        """
        key = (rows, drafts, g, streams, context)
        if key not in self._known:
            split = {"context": context, "ranks": self.ranks, "experts": self.experts}
            step = Step.routed(self.target, rows, g, streams=streams, **split, top_k=min(rows, 256))
            drafter = self.drafter if drafts else None
            self._known[key] = round_time(self.fits, self.target, drafter, step, self.gpu).us
        return self._known[key]


def arm_speeds(acceptance: pd.DataFrame, cost: RoundCost, *, g: float, streams: int, context: int) -> pd.DataFrame:
    """Divide acceptance by cost, arm by arm.

    Args:
        acceptance: one row an arm, of `summarize`: method, setting, tokens_per_round, rounds_by_rows.
        cost: of a round.
        g, streams, context: the point.

    Returns:
        method, setting, tokens_per_round, round_us (mean over the arm's rounds) and tok_s (all streams).

    Raises:
        ArgumentError: a column is missing.
    """
    missing = [name for name in _NEEDED if name not in acceptance.columns]
    if missing:
        raise ArgumentError("acceptance", f"columns {', '.join(_NEEDED)}", f"no {', '.join(missing)}")
    table = acceptance[["method", "setting", "tokens_per_round"]].reset_index(drop=True)
    times = []
    for method, by_rows in zip(acceptance["method"], acceptance["rounds_by_rows"], strict=True):
        point = {"drafts": method != "ar", "g": g, "streams": streams, "context": context}
        total = sum(by_rows.values())
        times.append(sum(count * cost.us(int(rows), **point) for rows, count in by_rows.items()) / total)
    table["round_us"] = times
    table["tok_s"] = 1e6 * streams * table["tokens_per_round"] / table["round_us"]
    return table


def tree_gain(speeds: pd.DataFrame) -> dict[str, float | str]:
    """Return the best tree, the best control and what the tree gains over it (negative: it loses).

    Raises:
        ArgumentError: there is no tree, or no control.
    """
    is_tree = speeds["method"].isin(_TREES)
    if is_tree.all() or not is_tree.any():
        raise ArgumentError("acceptance", "trees and controls", sorted(set(speeds["method"])))
    tree = speeds.loc[speeds[is_tree]["tok_s"].idxmax()]
    control = speeds.loc[speeds[~is_tree]["tok_s"].idxmax()]
    return {
        "tree": str(tree["method"]),
        "budget": float(tree["setting"]),
        "tree_tok_s": float(tree["tok_s"]),
        "control": str(control["method"]),
        "control_setting": float(control["setting"]),
        "control_tok_s": float(control["tok_s"]),
        "gain": float(tree["tok_s"] / control["tok_s"] - 1.0),
    }


def phase_table(
    profiles: Mapping[str, pd.DataFrame],
    cost: RoundCost,
    *,
    g: Iterable[float] = (0.6, 0.7, 0.8, 0.9, 1.0),
    streams: Iterable[int] = (1, 4, 8, 16, 32),
    contexts: Iterable[int] = (1024, 8192, 32768),
) -> pd.DataFrame:
    """Return where a tree pays: one row a profile and point, with the columns of `tree_gain`.

    Args:
        profiles: acceptance by name, such as a kind of text; see `arm_speeds`.
        cost: of a round.
        g, streams, contexts: the grid.
    """
    grid = [(one, count, rows) for one in g for count in streams for rows in contexts]
    found = []
    for name, acceptance in profiles.items():
        for one, count, rows in grid:
            speeds = arm_speeds(acceptance, cost, g=one, streams=count, context=rows)
            point = {"profile": name, "g": one, "streams": count, "context": rows, "predicted": cost.gpu.name}
            found.append(point | tree_gain(speeds))
    return pd.DataFrame(found)
