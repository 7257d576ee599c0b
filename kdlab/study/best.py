"""The best budget by tokens per second, and how sure its margin over the best control is."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study.bootstrap import check_level, percentile_interval, ratio, resample_counts
from kdlab.study.compare import check_table
from kdlab.study.cost import CostTable, arm_cost, check_halves

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
        interpolated, simulated: whether a time was interpolated, or a half is no measurement.
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
    interpolated: bool
    simulated: bool


@dataclass(frozen=True, eq=False)
class _Arms:
    """Arms with a known time: table [A rows: method, setting, source], tokens and time_ms [A, P] float64."""

    table: pd.DataFrame
    tokens: np.ndarray
    time_ms: np.ndarray
    rounds: np.ndarray

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
    level = check_level(level)
    check_table(table)
    if not mixed:
        check_halves(table, cost)
    arms = _collect(table, cost, interpolate)
    method = arms.table["method"].to_numpy()
    trees, controls = np.flatnonzero(method == "ddtree"), np.flatnonzero(np.isin(method, CONTROLS))
    for name, found in (("a budget", trees), ("a control (AR or a chain)", controls)):
        if not len(found):
            raise ArgumentError("table", f"{name} with a known round time", "none")
    num_prompts = arms.tokens.shape[1]
    total = arms.rates(np.ones(num_prompts))
    tree, control = trees[total[trees].argmax()], controls[total[controls].argmax()]
    drawn = arms.rates(resample_counts(num_prompts, num_resamples, seed))
    margins = drawn[:, tree] / drawn[:, controls].max(axis=1) - 1.0
    low, high = percentile_interval(margins, num_prompts, level)
    plain = total[method == "ar"]
    tok_s = 1000.0 * cost.streams * total
    return BestBudget(
        budget=int(arms.table["setting"].iloc[tree]),
        tok_s=float(tok_s[tree]),
        tokens_per_round=float(arms.tokens[tree].sum() / arms.rounds[tree].sum()),
        control_method=str(method[control]),
        control_setting=float(arms.table["setting"].iloc[control]),
        control_tok_s=float(tok_s[control]),
        margin=float(total[tree] / total[control] - 1.0),
        margin_low=low,
        margin_high=high,
        margin_over_ar=float(total[tree] / plain[0] - 1.0) if len(plain) else float("nan"),
        held_out_margin=_held_out(arms, trees, controls),
        selected_share=float((trees[drawn[:, trees].argmax(axis=1)] == tree).mean()),
        num_prompts=num_prompts,
        level=level,
        interpolated=bool((arms.table["source"] == "interpolated").any()),
        simulated=bool(table["simulated"].any() or cost.simulated or mixed),
    )


def _held_out(arms: _Arms, trees: np.ndarray, controls: np.ndarray) -> float:
    """Leave one prompt out: choose tree and control on the others, measure both on it, sum over prompts."""
    num_prompts = arms.tokens.shape[1]
    if num_prompts < 2:
        return float("nan")
    rates = arms.rates(np.ones((num_prompts, num_prompts)) - np.eye(num_prompts))
    speeds = []
    for chosen in (trees, controls):
        arm = chosen[rates[:, chosen].argmax(axis=1)]
        prompt = np.arange(num_prompts)
        speeds.append(arms.tokens[arm, prompt].sum() / arms.time_ms[arm, prompt].sum())
    return float(speeds[0] / speeds[1] - 1.0)


def _collect(table: pd.DataFrame, cost: CostTable, interpolate: bool) -> _Arms:
    """Gather tokens and times of every arm with a known time, prompts in one order."""
    prompts: list[object] | None = None
    found = []
    for (method, setting), group in table.groupby(["method", "setting"], sort=False):
        group = group.sort_values("prompt")
        prompts = group["prompt"].tolist() if prompts is None else prompts
        if group["prompt"].tolist() != prompts:
            raise ComparisonError(f"prompt: {method} {setting:g} has other prompts than the arms before it")
        costs = [_prompt_cost(cost, row, interpolate) for row in group.to_dict("records")]
        sources = {source for _, source in costs}
        if "none" in sources:
            continue
        source = "interpolated" if "interpolated" in sources else "measured"
        tokens, rounds = [sum(lengths) for lengths in group["round_lengths"]], group["num_rounds"].tolist()
        found.append(((method, setting, source), tokens, [time for time, _ in costs], rounds))
    if not found:
        raise ArgumentError("cost", "times of the arms of the table", "none")
    arms = pd.DataFrame([arm for arm, *_ in found], columns=["method", "setting", "source"])
    return _Arms(arms, *(np.array([row[part] for row in found], dtype=np.float64) for part in (1, 2, 3)))


def _prompt_cost(cost: CostTable, row: dict, interpolate: bool) -> tuple[float, str]:
    """Milliseconds of all rounds of one prompt under one arm, and the source of the times."""
    if not row["num_rounds"]:
        return 0.0, "measured"
    by_rows = pd.Series(row["round_rows"]).value_counts().to_dict()
    median, _, _, source = arm_cost(cost, row["method"], row["setting"], by_rows, interpolate)
    return median * row["num_rounds"], source
