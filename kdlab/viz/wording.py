"""How margins are written, the same in titles and in findings."""

from collections.abc import Iterable

import numpy as np

from kdlab.study import BestBudget
from kdlab.viz.arms import arm_label


def percent(share: float) -> str:
    """Write a share as a signed percentage."""
    return f"{100.0 * share:+.{0 if abs(share) >= 0.0995 else 1}f} %".replace("-", "−")


def plain_sentences(*findings: str) -> list[str]:
    """Return the lines of Markdown findings without its marks, for places that show plain text."""
    lines = [line.strip().removeprefix("- ") for text in findings for line in text.splitlines()]
    return [line.replace("**", "") for line in lines if line]


def span_text(low: float, high: float) -> str:
    """Write the two ends of an interval of shares as signed percentages."""
    return f"{percent(low).removesuffix(' %')} to {percent(high)}"


def prompts_text(num_prompts: int) -> str:
    """Write a number of prompts."""
    return f"{num_prompts} prompt{'s' if num_prompts != 1 else ''}"


def streams_text(num_streams: int) -> str:
    """Write a number of streams."""
    return f"{num_streams} stream{'s' if num_streams != 1 else ''}"


def beyond_notes(speeds: Iterable[float]) -> list[str]:
    """Say why speeds are missing, where some are: of `kdlab.study.phase.arm_speeds`, or what follows from them."""
    words = "left out: more rows in all, or more streams at a context, than in any recorded round"
    return [words] if np.isnan(list(speeds)).any() else []


def margin_text(margin: float, control: str) -> str:
    """Write a margin over (or, where it is negative, against) a control."""
    return f"{percent(margin)} {'over' if margin >= 0 else 'against'} {control}"


def best_sentence(best: BestBudget) -> str:
    """Name the best budget, its speed, its margin over the best control and that margin's interval: no verdict.

    Whether the margin is a gain is for `kdlab.viz.verdict` to say, which looks at live decodes too.
    """
    timed = "" if best.budget_interpolated else "timed "
    control = f"the best control ({arm_label(best.control_method, best.control_setting)})"
    lines = (
        f"Best {timed}budget {best.budget}: {best.tok_s:,.0f} tokens/s",
        margin_text(best.margin, control),
        interval_text(best),
    )
    return ",\n".join(lines)


def interval_text(best: BestBudget) -> str:
    """Write the interval of the margin, and what it takes as exact."""
    if np.isnan(best.margin_low):
        return f"no interval from {prompts_text(best.num_prompts)}"
    between = span_text(best.margin_low, best.margin_high)
    return f"{100.0 * best.level:.0f} % interval over {best.num_prompts} prompts {between}, round times taken as exact"
