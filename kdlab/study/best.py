"""The best budget by tokens per second, and how sure its margin over the best control is."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd

from kdlab.checks import check_float
from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study.bootstrap import percentile_interval, ratio, resample_counts
from kdlab.study.compare import check_table
from kdlab.study.cost import CostTable, RoundMs, arm_cost, check_halves

TREES = ("ddtree",)
CONTROLS = ("ar", "chain", "adaptive_chain")


@dataclass(frozen=True)
class BestBudget:
    """The best budget of a sweep; margins are quotients of tokens per second minus 1.

    Attributes:
        budget, tok_s, tokens_per_round: the budget, its tokens per second (all streams) and its acceptance.
        control_method, control_setting, control_tok_s: the fastest control.
        margin, margin_low, margin_high: over that control, with its bootstrap interval over prompts.
        margin_over_ar: over AR; NaN where AR has no time.
        held_out_margin: the margin where budget and control of each prompt are chosen on the other prompts.
        selected_share: share of resamples in which the same budget is the fastest.
        num_prompts, level: prompts resampled, share inside the interval.
        budget_interpolated: whether the budget's own round time was interpolated.
        interpolated, simulated: whether a time of budget or control was interpolated, or a half is no measurement.
    """

    budget: int
    tok_s: float
    tokens_per_round: float
    control_method: str
    control_setting: float
    control_tok_s: float
    margin: float
    margin_low: float
    margin_high: float
    margin_over_ar: float
    held_out_margin: float
    selected_share: float
    num_prompts: int
    level: float
    budget_interpolated: bool
    interpolated: bool
    simulated: bool


@dataclass(frozen=True, eq=False)
class _Arms:
    """A arms with a known time, over P prompts."""

    table: pd.DataFrame  # A rows: method, setting, source of the time
    tokens: np.ndarray  # [A, P] f64
    time_ms: np.ndarray  # [A, P] f64, all rounds of the prompt
    rounds: np.ndarray  # [A, P] f64

    @property
    def num_prompts(self) -> int:
        """Number of prompts P."""
        return self.tokens.shape[1]

    def of(self, methods: Sequence[str]) -> np.ndarray:
        """Indices of the arms of some methods."""
        return np.flatnonzero(self.table["method"].isin(methods))

    def fastest(self, methods: Sequence[str]) -> int:
        """Index of the arm of some methods with the most tokens per second over all prompts."""
        candidates = self.of(methods)
        return int(candidates[self.rates(np.ones(self.num_prompts))[candidates].argmax()])

    def rates(self, counts: np.ndarray) -> np.ndarray:
        """Tokens per millisecond of each arm when prompts count [..., P] times: [..., A]; -inf without a round."""
        rate = ratio(counts @ self.tokens.T, counts @ self.time_ms.T)
        return np.where(np.isnan(rate), -np.inf, rate)


def best_budget(
    table: pd.DataFrame,
    cost: CostTable,
    *,
    num_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    interpolate: bool = False,
    mixed: bool = False,
) -> BestBudget:
    """Name the fastest measured budget, and its margin over the fastest control.

    The budget is chosen on the same prompts that its margin is computed on, so `margin` leans upwards. Three things
    keep that in the open. In every resample the best control is chosen anew while the budget stays, which leans
    against the budget. `held_out_margin` chooses both on all prompts but one and measures them on that one.
    `selected_share` says how often another draw of prompts would have named the same budget.

    Args:
        table: rows of `sweep`, and of the controls `sweep_ar`, `sweep_chains`, `sweep_adaptive_chains`.
        cost: measured round times; arms without one take no part.
        num_resamples, level, seed: of the bootstrap over prompts; with fewer than 5 prompts the interval is NaN.
        interpolate, mixed: as for `speed`.

    Raises:
        ArgumentError: no budget or no control has a time, or a number is out of range.
        ComparisonError: arms differ in provenance or in their prompts, or acceptance and cost do.
    """
    level = check_float("level", level, above=0.0, below=1.0)
    check_table(table)
    if not mixed:
        check_halves(table, cost)
    arms = _collect(table, cost, interpolate)
    drawn = arms.rates(resample_counts(arms.num_prompts, num_resamples, seed))
    tree, control = arms.fastest(TREES), arms.fastest(CONTROLS)
    with np.errstate(invalid="ignore"):  # a resample of prompts without a round has no margin
        margins = drawn[:, tree] / drawn[:, arms.of(CONTROLS)].max(axis=1) - 1.0
    low, high = percentile_interval(margins, arms.num_prompts, level)
    trees = arms.of(TREES)
    return BestBudget(
        **_point_estimates(arms, tree, control, ms_to_s=1000.0 * cost.streams),
        margin_low=low,
        margin_high=high,
        held_out_margin=_held_out(arms),
        selected_share=float((trees[drawn[:, trees].argmax(axis=1)] == tree).mean()),
        num_prompts=arms.num_prompts,
        level=level,
        budget_interpolated=bool(arms.table["source"].iloc[tree] == "interpolated"),
        interpolated=bool((arms.table["source"].iloc[[tree, control]] == "interpolated").any()),
        simulated=bool(table["simulated"].any() or cost.simulated or mixed),
    )


def _point_estimates(arms: _Arms, tree: int, control: int, ms_to_s: float) -> dict[str, Any]:
    """Speeds of the chosen tree and control over all prompts, and the margins between them."""
    rates, plain = arms.rates(np.ones(arms.num_prompts)), arms.of(("ar",))
    return {
        "budget": int(arms.table["setting"].iloc[tree]),
        "tok_s": float(ms_to_s * rates[tree]),
        "tokens_per_round": float(arms.tokens[tree].sum() / arms.rounds[tree].sum()),
        "control_method": str(arms.table["method"].iloc[control]),
        "control_setting": float(arms.table["setting"].iloc[control]),
        "control_tok_s": float(ms_to_s * rates[control]),
        "margin": float(rates[tree] / rates[control] - 1.0),
        "margin_over_ar": float(rates[tree] / rates[plain[0]] - 1.0) if len(plain) else float("nan"),
    }


def _held_out(arms: _Arms) -> float:
    """Leave one prompt out: choose tree and control on the others, measure both on it, sum over prompts."""
    if arms.num_prompts < 2:
        return float("nan")
    left_out = np.arange(arms.num_prompts)
    rates = arms.rates(1.0 - np.eye(arms.num_prompts))
    speeds = []
    for methods in (TREES, CONTROLS):
        candidates = arms.of(methods)
        chosen = candidates[rates[:, candidates].argmax(axis=1)]
        speeds.append(arms.tokens[chosen, left_out].sum() / arms.time_ms[chosen, left_out].sum())
    return float(speeds[0] / speeds[1] - 1.0)


def _collect(table: pd.DataFrame, cost: CostTable, interpolate: bool) -> _Arms:
    """Gather tokens and times of every arm with a known time, prompts in one order."""
    prompts: list[object] | None = None
    round_ms = cache(partial(cost.round_ms, interpolate=interpolate))
    found = []
    for (method, setting), unsorted in table.groupby(["method", "setting"], sort=False):
        group = unsorted.sort_values("prompt")
        prompts = group["prompt"].tolist() if prompts is None else prompts
        if group["prompt"].tolist() != prompts:
            raise ComparisonError(f"prompt: {method} {setting:g} has other prompts than the arms before it")
        costs = [_prompt_cost(round_ms, row) for row in group.to_dict("records")]
        sources = {source for _, source in costs}
        if "none" not in sources:
            source = "interpolated" if "interpolated" in sources else "measured"
            written = [sum(lengths) for lengths in group["round_lengths"]]
            times = [time for time, _ in costs]
            found.append(((method, setting, source), written, times, group["num_rounds"].tolist()))
    arms = pd.DataFrame([arm for arm, *_ in found], columns=["method", "setting", "source"])
    tokens, time_ms, rounds = (np.array([row[part] for row in found], dtype=np.float64) for part in (1, 2, 3))
    result = _Arms(arms, tokens, time_ms, rounds)
    for name, methods in (("a budget", TREES), ("a control (AR or a chain)", CONTROLS)):
        if not len(result.of(methods)):
            raise ArgumentError("table", f"{name} with a known round time", "none")
    if not result.rounds.any():
        raise ArgumentError("table", "at least one round", "prompts without any")
    return result


def _prompt_cost(round_ms: RoundMs, row: dict[Any, Any]) -> tuple[float, str]:
    """Milliseconds of all rounds of one prompt under one arm, and the source of the times."""
    if not row["num_rounds"]:
        return 0.0, "measured"
    median, _, _, source = arm_cost(round_ms, row["method"], row["setting"], Counter(row["round_rows"]))
    return median * row["num_rounds"], source
