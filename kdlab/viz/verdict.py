"""The one verdict of a budget sweep, by the quotient and by live decodes: a gain, a loss, or too close to call."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kdlab.errors import ArgumentError
from kdlab.study import BestBudget
from kdlab.study.bootstrap import MIN_PROMPTS, percentile_interval, resample_counts
from kdlab.viz.arms import arm_label
from kdlab.viz.wording import interval_text, margin_text, percent, prompts_text, span_text


@dataclass(frozen=True)
class LiveMargin:
    """The best budget over a control in whole decodes of the same prompts, tokens per second of one over the other - 1.

    Attributes:
        control: (method, setting) of the control that was timed live.
        same_control: whether that is the best control of the quotient.
        margin: geometric mean over prompts, minus 1.
        low, high: its bootstrap interval over prompts; NaN with fewer than 5 prompts.
        by_prompt: one margin a prompt that both decoded.
    """

    control: tuple[str, float]
    same_control: bool
    margin: float
    low: float
    high: float
    by_prompt: pd.Series


def live_margin(best: BestBudget, live: pd.DataFrame, *, num_resamples: int = 2000, seed: int = 0) -> LiveMargin:
    """Compare the best budget with the quotient's best control in live decodes.

    Where that control was not decoded live, the nearest setting of its method stands in (of two equally near ones the
    faster), and where its whole method was not, the fastest control that was.

    Args:
        best: from `kdlab.study.best_budget`, on round times of the same decodes.
        live: tokens per second, one row a prompt, one column a (method, setting).
        num_resamples, seed: of the bootstrap over prompts; the level is that of `best`.

    Raises:
        ArgumentError: the budget, or every control, was not decoded live, or no prompt by both.
    """
    tree = ("ddtree", float(best.budget))
    if tree not in live.columns:
        raise ArgumentError("live", f"a column of {arm_label(*tree)}", list(live.columns))
    control = _nearest_control(best, live)
    pairs = live[[tree, control]].dropna()
    if pairs.empty:
        raise ArgumentError("live", f"prompts decoded by {arm_label(*tree)} and {arm_label(*control)}", "none")
    quotients = pairs[tree] / pairs[control]
    logs, num_prompts = np.log(quotients.to_numpy(dtype=np.float64)), len(pairs)
    drawn = np.expm1(resample_counts(num_prompts, num_resamples, seed) @ logs / num_prompts)
    low, high = percentile_interval(drawn, num_prompts, best.level)
    same = control == (best.control_method, best.control_setting)
    return LiveMargin(control, same, float(np.expm1(logs.mean())), low, high, quotients - 1.0)


def verdict(best: BestBudget, live: pd.DataFrame, *, num_resamples: int = 2000, seed: int = 0) -> str:
    """Say as Markdown whether the best budget gains over its best control, by the quotient and by live decodes.

    It is a gain (a loss) only where both margins are above (below) zero and neither interval includes zero.

    Args:
        best, live, num_resamples, seed: as for `live_margin`.

    Raises:
        ArgumentError: as `live_margin`.
    """
    found = live_margin(best, live, num_resamples=num_resamples, seed=seed)
    word, reason = _word(best, found)
    return f"**{word}.** {_quotient_text(best)} {_live_text(best, found)}{reason}"


def _nearest_control(best: BestBudget, live: pd.DataFrame) -> tuple[str, float]:
    medians = live.median()
    controls = [(str(method), float(setting)) for method, setting in live.columns if method != "ddtree"]
    if not controls:
        raise ArgumentError("live", "a column of AR or a chain", list(live.columns))
    related = [control for control in controls if control[0] == best.control_method]
    if not related:
        return max(controls, key=lambda control: medians[control])
    return min(related, key=lambda control: (abs(control[1] - best.control_setting), -medians[control]))


def _word(best: BestBudget, found: LiveMargin) -> tuple[str, str]:
    """The verdict, and what the numbers before it do not say of its reason."""
    num_prompts = len(found.by_prompt)
    close = "Too close to call on this device"
    if best.simulated:
        return "No verdict", " One half of the quotient is simulated."
    if num_prompts < MIN_PROMPTS:
        return f"No verdict from {prompts_text(num_prompts)}", f" A verdict needs at least {MIN_PROMPTS} prompts."
    if np.sign(best.margin) != np.sign(found.margin):
        return close, " The two have different signs."
    if found.low <= 0.0 <= found.high:
        return close, " The live interval includes zero."
    if best.margin_low <= 0.0 <= best.margin_high:
        return close, " The interval of the quotient includes zero."
    return ("A gain on this device" if found.margin > 0 else "A loss on this device"), ""


def _quotient_text(best: BestBudget) -> str:
    control = arm_label(best.control_method, best.control_setting)
    return f"Acceptance over cost: budget {best.budget} {margin_text(best.margin, control)} ({interval_text(best)})."


def _live_text(best: BestBudget, found: LiveMargin) -> str:
    control, margins = arm_label(*found.control), found.by_prompt
    if not found.same_control:
        nearest = "nearest to it" if found.control[0] == best.control_method else "fastest control"
        control += f" (that control was not decoded live, this is the {nearest} that was)"
    if len(margins) < MIN_PROMPTS:
        return f"Live decodes: {', '.join(percent(margin) for margin in margins)} against {control}."
    between = f"{100.0 * best.level:.0f} % interval over {len(margins)} prompts {span_text(found.low, found.high)}"
    faster = f"faster on {int((margins > 0).sum())} of them"
    return f"Live decodes: {margin_text(found.margin, control)}; {between}; {faster}."
