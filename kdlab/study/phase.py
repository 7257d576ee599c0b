"""Does a tree pay? Recorded acceptance over the fitted cost of a K2.6 round, over routing, streams and context.

Both halves come from elsewhere: acceptance from `workloads`, the time of a round from `step_fit`. A tree pays where its
tokens per second pass those of the best control: AR, every chain and every adaptive chain, free to choose their length
at each point, as the tree is free to choose its budget.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError
from kdlab.study.best import CONTROLS
from kdlab.study.bootstrap import percentile_interval
from kdlab.study.gpus import MEASURED_H200, Gpu
from kdlab.study.step_cost import Step
from kdlab.study.step_fit import RoundFit, RoundTime, round_time
from kdlab.study.workloads import Arm, Workload


class Rivals(NamedTuple):
    """Methods of the trees and of the controls that are compared; the best of either side at a point."""

    trees: tuple[str, ...]
    controls: tuple[str, ...]


_TREE_METHODS = ("ddtree", "beam", "adaptive_tree")
BEST = Rivals(("ddtree",), CONTROLS)
COMPARISONS = {
    "fixed tree, fixed controls": Rivals(("ddtree",), ("ar", "chain")),
    "fixed tree, best control": BEST,
    "adaptive tree, best control": Rivals(("adaptive_tree",), CONTROLS),
}
"""The second is the question. The first is what it becomes where a drafter's confidence says nothing, or where rounds
have one shape; the third gives the tree the freedom that its best control has."""
PAYS, COSTS, OPEN = "pays", "costs", "open"
"""What is said of a point: the whole interval of the gain above a margin, below minus that margin, or neither."""


@dataclass(frozen=True, eq=False)
class RoundCost:
    """The time of a round of one model on one machine.

    Attributes:
        fit: of `fit_rounds`, or of `floor_fit`.
        target, drafter: constants of the models.
        ranks, experts: how they are split.
        gpu: MEASURED_H200, or one of `carried_over`.
        trees_alike: how much lower the exponent g is between rows of a tree than between those of a chain.
    """

    fit: RoundFit
    target: TargetConfig
    drafter: DrafterConfig
    ranks: int = 8
    experts: str = "tp"
    gpu: Gpu = MEASURED_H200
    trees_alike: float = 0.0
    _known: dict[tuple[int, bool, float, int, int], float] = field(default_factory=dict, init=False, repr=False)

    def us(self, rows: int, *, drafts: bool, g: float, streams: int, context: int) -> float:
        """Return microseconds of a round, remembered; see `time`."""
        key = (rows, drafts, g, streams, context)
        if key not in self._known:
            self._known[key] = self.time(rows, drafts=drafts, g=g, streams=streams, context=context).us
        return self._known[key]

    def at(self, *, g: float, streams: int, context: int) -> Callable[[int, str], float]:
        """Return (rows, method) to microseconds at one point, for `Yields.speeds`; g is that of chains."""
        lower = max(0.0, g - self.trees_alike)

        def us(rows: int, method: str) -> float:
            own = lower if method in _TREE_METHODS else g
            return self.us(rows, drafts=method != "ar", g=own, streams=streams, context=context)

        return us

    def time(self, rows: int, *, drafts: bool, g: float, streams: int, context: int) -> RoundTime:
        """Return the time of a round by stage.

        Args:
            rows: verified a stream.
            drafts: the drafter runs; AR does without.
            g: exponent of correlated routing within a stream.
            streams, context: S and committed rows of each.
        """
        split = {"context": context, "ranks": self.ranks, "experts": self.experts}
        step = Step.routed(self.target, rows, g, streams=streams, **split, top_k=min(max(1, rows - 1), 256))
        return round_time(self.fit, self.target, self.drafter if drafts else None, step, self.gpu)


def arm_speeds(work: Workload, cost: RoundCost, *, g: float, streams: int, context: int) -> pd.DataFrame:
    """Divide acceptance by cost, arm by arm.

    Returns:
        method, setting, tokens_per_round and tok_s (all streams; NaN where they verify more rows than the largest
        fitted round, or are more than were recorded at such a context).
    """
    yields = work.yields()
    table = pd.DataFrame(work.arms, columns=["method", "setting"]).assign(tokens_per_round=yields.tokens[0])
    tok_s = 1e6 * streams * yields.speeds(cost.at(g=g, streams=streams, context=context), streams)[0]
    rows = streams * (yields.shares[0] @ yields.rows)
    beyond = (rows > cost.fit.most_rows) | (not cost.fit.covers(streams, context))
    return table.assign(tok_s=np.where(beyond, np.nan, tok_s))


def tree_gain(
    arms: Sequence[Arm], rates: np.ndarray, drawn: np.ndarray, rivals: Rivals = BEST, *, num_prompts: int,
    level: float = 0.95, margin: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Return the best tree, the best control and what the tree gains over it (negative: it loses).

    Both are chosen on the prompts that they are measured on, so the interval leans against either: at its lower end the
    tree stays as chosen while every resample of prompts chooses its control anew, at its upper end the other way round.
    Round times are taken as exact in it; `margin` is for their error.

    Args:
        arms: A arms.
        rates: [A] f64, speeds.
        drawn: [n, A] f64, speeds of resampled prompts.
        rivals: which arms are trees, and which controls.
        num_prompts: fewest prompts of a kind; below 5 there is no interval, and the call is OPEN.
        level: share inside the interval.
        margin: how far from zero the interval has to lie for a call.

    Returns:
        tree, budget (its setting), control, control_setting, gain, low, high, call (PAYS, COSTS or OPEN) and over_ar,
        the tree's gain over AR.

    Raises:
        ArgumentError: there is no tree, or no control.
    """
    is_tree, is_control = (np.array([method in chosen for method, _ in arms]) for chosen in rivals)
    if not is_tree.any() or not is_control.any():
        raise ArgumentError("arms", f"trees and controls of {tuple(rivals)}", sorted({method for method, _ in arms}))
    tree, control = (int(np.where(chosen, rates, -np.inf).argmax()) for chosen in (is_tree, is_control))
    low, _ = percentile_interval(drawn[:, tree] / drawn[:, is_control].max(axis=1) - 1.0, num_prompts, level)
    _, high = percentile_interval(drawn[:, is_tree].max(axis=1) / drawn[:, control] - 1.0, num_prompts, level)
    plain = [float(rates[index]) for index, (method, _) in enumerate(arms) if method == "ar"]
    return {
        "tree": arms[tree][0],
        "budget": arms[tree][1],
        "control": arms[control][0],
        "control_setting": arms[control][1],
        "gain": float(rates[tree] / rates[control] - 1.0),
        "low": low,
        "high": high,
        "call": PAYS if low > margin else COSTS if high < -margin else OPEN,
        "over_ar": float(rates[tree] / plain[0] - 1.0) if plain else float("nan"),
    }


def phase_table(
    works: Mapping[Any, Workload],
    cost: RoundCost,
    *,
    g: Iterable[float],
    streams: Iterable[int],
    contexts: Iterable[int],
    comparisons: Mapping[str, Rivals] = COMPARISONS,
    num_resamples: int = 1000,
) -> pd.DataFrame:
    """Return where a tree pays: one row a workload, point and comparison.

    More streams at a context than were recorded there are no points. A call needs an interval farther from zero than
    the fitted times are typically off, see `RoundFit.error`.

    Args:
        works: workloads by name, or by their place on a line.
        cost: of a round.
        g, streams, contexts: the grid.
        comparisons: which trees against which controls.
        num_resamples: of the prompts.

    Returns:
        work (the name), g, streams, context, comparison, the columns of `tree_gain`, and tok_s of the tree (all
        streams).
    """
    pairs = [(count, rows) for count in streams for rows in contexts if cost.fit.covers(count, rows)]
    grid = [(one, *pair) for one in g for pair in pairs]
    found = []
    for name, work in works.items():
        known, resampled = work.yields(), work.yields(num_resamples)
        num_prompts = min(profile.tokens.shape[1] for profile, share in work.parts if share > 0)
        for one, count, rows in grid:
            round_us = cost.at(g=one, streams=count, context=rows)
            rates, drawn = known.speeds(round_us, count)[0], resampled.speeds(round_us, count)
            for comparison, rivals in comparisons.items():
                gain = tree_gain(work.arms, rates, drawn, rivals, num_prompts=num_prompts, margin=cost.fit.error)
                tok_s = 1e6 * count * float(rates[work.arms.index((gain["tree"], gain["budget"]))])
                point = {"work": name, "g": one, "streams": count, "context": rows, "comparison": comparison}
                found.append(point | gain | {"tok_s": tok_s})
    return pd.DataFrame(found)


def budget_table(
    work: Workload, cost: RoundCost, *, g: float, streams: Iterable[int], contexts: Iterable[int]
) -> pd.DataFrame:
    """Return how many times as fast as AR every tree is, and the best of each other method beside it.

    Returns:
        One row an arm and point: streams, context, arm (a budget, or the name of a method), over_ar (a factor, NaN as
        in `arm_speeds`) and best (bool: of the budgets).

    Raises:
        ArgumentError: the workload has no AR, or no tree.
    """
    names = {method for method, _ in work.arms}
    if not {"ar", *BEST.trees} <= names:
        raise ArgumentError("work", "AR and trees", sorted(names))
    found = []
    for count in streams:
        for rows in contexts:
            speeds = arm_speeds(work, cost, g=g, streams=count, context=rows)
            plain = speeds.loc[speeds["method"] == "ar", "tok_s"].iloc[0]
            trees = speeds[speeds["method"].isin(BEST.trees)]
            for budget, tok_s in zip(trees["setting"], trees["tok_s"], strict=True):
                found.append((count, rows, f"{budget:g}", tok_s / plain, bool(tok_s == trees["tok_s"].max())))
            for method in ("chain", "adaptive_chain", "adaptive_tree"):
                others = speeds.loc[speeds["method"] == method, "tok_s"]
                if len(others):
                    found.append((count, rows, method.replace("_", " "), others.max() / plain, False))
    return pd.DataFrame(found, columns=["streams", "context", "arm", "over_ar", "best"])
