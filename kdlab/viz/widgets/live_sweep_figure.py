"""Live rounds so far over the curves that a recording predicts, and whether the two agree."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kdlab.study import summarize
from kdlab.viz import theme
from kdlab.viz.arms import STYLES, arm_label, arm_style, mark_flags
from kdlab.viz.sweep import ROWS_LABEL, TOKENS_LABEL, rows_axis
from kdlab.viz.wording import prompts_text


def plot_live_sweep(
    live: pd.DataFrame, predicted: pd.DataFrame | None = None, ax: Axes | None = None, *,
    title: str = "Live rounds", provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw tokens per round of live rounds as marks with intervals, and what a recording predicts as lines.

    Args:
        live: rows of `kdlab.study.sweep_live`; there may be none yet.
        predicted: from `kdlab.study.summarize`; None draws the marks alone.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what the rounds ran.
    """
    ax = theme.new_axes(ax)
    summary = summarize(live) if len(live) else live
    for method in STYLES:
        marks = summary[summary["method"] == method]
        if predicted is not None:
            _draw_curve(ax, predicted[predicted["method"] == method], method, is_named=marks.empty)
        _draw_marks(ax, marks, method)
    known = [table["rows_per_round"] for table in (summary, predicted) if table is not None and len(table)]
    rows_axis(ax, pd.concat(known) if known else pd.Series([32.0]))
    ax.set_ylim(bottom=0.0)
    theme.style_axes(ax, title=title, xlabel=ROWS_LABEL, ylabel=TOKENS_LABEL)
    if predicted is not None:
        ax.plot([], [], color=theme.GREY, linewidth=1.4, label="line: predicted by the recording")
    mark_flags(ax, summary)
    theme.add_legend(ax, loc="lower right")
    theme.add_caption(ax, provenance)
    return ax


def live_findings(checks: pd.DataFrame) -> str:
    """Say as a Markdown list whether live rounds are what a recording predicted, and which arms are not.

    Args:
        checks: from `kdlab.study.check_live`.
    """
    if checks.empty:
        return "- No turn was whole: nothing was compared."
    rows = checks.to_dict("records")
    lines = [_difference(row) for row in rows if row["equal_prompts"] < row["num_prompts"]]
    prompts = prompts_text(max(row["num_prompts"] for row in rows))
    same = f"{len(rows) - len(lines)} of {len(rows)} methods and settings" if lines else "every method and setting"
    return "\n".join([f"- Every round of {same} is as long as predicted, over {prompts}.", *lines])


def _difference(row: dict[Any, Any]) -> str:
    arm = arm_label(row["method"], row["setting"])
    rounds = f"{row['num_rounds']} rounds, {row['predicted_rounds']} predicted"
    wrong = " **More than near ties explain: live rounds or the recording are wrong.**" if row["far"] else ""
    return f"- {arm}: {row['equal_prompts']} of {prompts_text(row['num_prompts'])} equal, {rounds}.{wrong}"


def _draw_curve(ax: Axes, rows: pd.DataFrame, method: str, *, is_named: bool) -> None:
    if len(rows) < 2:
        return
    curve, style = rows.sort_values("rows_per_round"), arm_style(method)
    x, y = curve["rows_per_round"], curve["tokens_per_round"]
    ax.plot(x, y, color=style.colour, linestyle=style.line, linewidth=1.4, alpha=0.7, zorder=2,
            label=style.legend if is_named else None)  # fmt: skip


def _draw_marks(ax: Axes, rows: pd.DataFrame, method: str) -> None:
    if rows.empty:
        return
    style, mean = arm_style(method), rows["tokens_per_round"]
    bars = [mean - rows["tokens_per_round_low"], rows["tokens_per_round_high"] - mean]
    ax.errorbar(rows["rows_per_round"], mean, yerr=np.maximum(np.nan_to_num(bars), 0.0), linestyle="none", capsize=2.5,
                marker=style.marker, markersize=6.5, color=style.colour, elinewidth=1.2, label=style.legend,
                zorder=4)  # fmt: skip
