"""A trace of another engine beside a recording of kdlab: two panels of one scale, and whether they may be compared."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study.compare import TRACE_FIELDS, check_comparable
from kdlab.viz import theme
from kdlab.viz.arms import arm_label
from kdlab.viz.sweep import plot_tokens_per_round, rows_axis
from kdlab.viz.wording import prompts_text


def plot_trace(
    recorded: pd.DataFrame, imported: pd.DataFrame, axes: Sequence[Axes] | None = None, *,
    title: str = "A trace beside the recording", engine: str | None = None,
    provenance: Mapping[str, Any] | None = None, notes: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """Draw tokens per round of a recording and of a trace in two panels of equal axes, with one legend.

    Args:
        recorded: from `kdlab.study.summarize`.
        imported: from `kdlab.study.trace_summary`.
        axes: two axes of one figure; a new figure when None.
        title: of the figure.
        engine: that made the trace, named over its panel.
        provenance, notes: of the recording, for the caption below the figure.
    """
    if axes is None:
        figure = Figure(figsize=(theme.REPORT_INCHES, 4.4), facecolor="white", layout="constrained")
        axes = figure.subplots(1, 2)
    if len(axes) != 2:
        raise ArgumentError("axes", "two", len(axes))
    named = "the trace" if engine is None else f"the trace, by {engine}"
    plot_tokens_per_round(recorded, axes[0], title="recorded here", legend=False)
    plot_tokens_per_round(imported, axes[1], title=theme.drawable(named), legend=False)
    top, rows = (
        max(ax.get_ylim()[1] for ax in axes),
        pd.concat([recorded["rows_per_round"], imported["rows_per_round"]]),
    )
    entries: dict[str, Any] = {}
    for ax in axes:
        ax.set_ylim(0.0, top)
        rows_axis(ax, rows)
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    whole = theme.figure_of(axes[0])
    theme.add_figure_heading(whole, title, entries, num_columns=3)
    theme.add_figure_caption(whole, provenance, notes)
    return whole


def trace_findings(
    imported: pd.DataFrame,
    trace_provenance: Mapping[str, Any],
    provenance: Mapping[str, Any],
    limits: Sequence[str] = (),
) -> str:
    """Say what a trace measured, whether it may be compared with the recording, and its limits, as a Markdown list.

    Args:
        imported: from `kdlab.study.trace_summary`.
        trace_provenance: of the trace.
        provenance: of the recording.
        limits: from `kdlab.study.trace_limits`.
    """
    best = imported.loc[imported["tokens_per_round"].idxmax()]
    interval = f", interval {best['tokens_per_round_low']:.2f} to {best['tokens_per_round_high']:.2f}"
    known = interval if pd.notna(best["tokens_per_round_low"]) else ""
    arm = arm_label(str(best["method"]), float(best["setting"]))
    words = f"{best['tokens_per_round']:.2f} tokens per round{known} ({prompts_text(int(best['num_prompts']))})"
    of = " of the longest rounds" if len(imported) > 1 else ""
    lines = [f"- The trace{of}: {arm}, {words}."]
    try:
        check_comparable([provenance, trace_provenance], fields=TRACE_FIELDS)
        lines.append("- It was made from the same models, prompts and settings as the recording.")
    except ComparisonError as error:
        lines.append(f"- **Not to be compared** with the recording: {error}.")
    return "\n".join([*lines, *(f"- {line}" for line in limits)])
