"""Two runs of the same prompts side by side: the change of every measurement with its interval."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdlab.viz import theme
from kdlab.viz.arms import STYLES, arm_label
from kdlab.viz.wording import percent, span_text

METRICS = {
    "tokens_per_round": "tokens per round", "recorded_tokens_per_round": "tokens per round, from the draft field",
    "tokens_per_s": "tokens per second", "round_ms": "time of a round",
}  # fmt: skip
SURE = 0.05
"""Largest adjusted p value at which a change is called one."""
_LINE_INCHES = 0.26


def paired_name(row: Mapping[str, Any]) -> str:
    """Name the arm of a row of a run comparison, and its point where there are several."""
    method, setting = row["method"], row["setting"]
    known = isinstance(method, str) and method in STYLES
    name = arm_label(method, setting) if known else " ".join(str(part) for part in (method, setting) if pd.notna(part))
    return ": ".join(filter(None, (str(row["point"]), name)))


def is_change(row: Mapping[str, Any]) -> bool:
    """Whether a row of a run comparison shows a change: the sign test says so, and its interval is free of zero."""
    return bool(row["p_adjusted"] <= SURE and (row["change_low"] > 0 or row["change_high"] < 0))


def paired_sentences(table: pd.DataFrame) -> list[str]:
    """Say how many rows of a run comparison show a change, then of each of these how large it is and how sure."""
    rows = table.to_dict("records")
    changed = [_sentence(row) for row in rows if is_change(row) and not row["simulated"]]
    simulated = int(table["simulated"].sum())
    made_up = f" ({simulated} are simulated: no measurement)" if simulated else ""
    number = f"{len(rows)} measurement{'s' if len(rows) != 1 else ''}"
    return [f"{number} compared, {len(changed)} changed{made_up}.", *changed]


def plot_paired(
    table: pd.DataFrame,
    *,
    first: str,
    second: str,
    provenance: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
) -> Figure:
    """Draw the change of every measurement, one panel a metric: filled where `is_change`, hollow where not.

    Args:
        table: of `kdlab.report.compare_runs`.
        first, second: names of the runs.
        provenance, notes: for the caption.
    """
    panels = list(table.groupby("metric", sort=False))
    heights = [len(rows) + 2.0 for _, rows in panels]
    size = (theme.REPORT_INCHES, 0.9 + _LINE_INCHES * sum(heights) + 0.35 * len(panels))
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for ax, (metric, rows) in zip(axes, panels, strict=True):
        _draw_panel(ax, str(metric), rows, f"change from {first} to {second}, percent")
    theme.add_figure_caption(figure, provenance, notes)
    return figure


def _draw_panel(ax: Axes, metric: str, rows: pd.DataFrame, xlabel: str) -> None:
    for line, row in enumerate(rows.to_dict("records")):
        colour = theme.VERMILLION if row["simulated"] else theme.BLUE
        face = colour if is_change(row) else "white"
        if pd.notna(row["change_low"]):
            ends = [100.0 * row["change_low"], 100.0 * row["change_high"]]
            ax.plot(ends, [line, line], color=colour, linewidth=1.6)
        ax.plot(100.0 * row["change"], line, marker="o", color=colour, markerfacecolor=face, linestyle="none")
    ax.axvline(0.0, color=theme.BLACK, linewidth=0.8)
    names = [paired_name(row) + (" (simulated)" if row["simulated"] else "") for row in rows.to_dict("records")]
    ax.set_yticks(range(len(rows)), [theme.drawable(name) for name in names], parse_math=False)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    theme.style_axes(ax, title=METRICS.get(metric, metric), xlabel=xlabel, ylabel="", grid="x")


def _sentence(row: Mapping[str, Any]) -> str:
    what = f"{paired_name(row)}, {METRICS.get(row['metric'], row['metric'])}"
    between = span_text(row["change_low"], row["change_high"])
    counts = f"higher on {row['higher']} and lower on {row['lower']} of {row['num_prompts']} prompts"
    return f"{what}: {percent(row['change'])} ({between}), {counts}, p = {row['p_adjusted']:.2g}."
