"""The time of a K2.6 round: measured beside fitted, and what becomes of it: speed by budget, and on other GPUs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdlab.errors import ArgumentError
from kdlab.study.step_fit import WHOLE
from kdlab.viz import theme
from kdlab.viz.wording import beyond_notes, streams_text

_NAMED_STAGES = 6
_BAND = 0.1


def plot_round_fit(
    points: pd.DataFrame, several: pd.DataFrame | None = None, *, title: str = "Measured times and their fit",
    provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Figure:  # fmt: skip
    """Draw every recorded time against its fit, and what the fit is off by, stages and whole rounds.

    Args:
        points: of `kdlab.study.step_fit.fitted_points`: stage, measured_us, fitted_us, residual.
        several: whole rounds of several GPUs in the same columns, collectives inside.
        title: of the figure.
        provenance: adds the line that says on what it was measured.
        notes: put before the provenance.
    """
    if points.empty:
        raise ArgumentError("points", "at least one", "none")
    figure = Figure(figsize=(theme.REPORT_INCHES, 5.6), facecolor="white", layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    stages, wholes = points[points["stage"] != WHOLE], points[points["stage"] == WHOLE]
    named = list(stages.groupby("stage")["measured_us"].sum().nlargest(_NAMED_STAGES).index)
    groups: list[tuple[str, pd.DataFrame, dict[str, Any]]] = [
        ("all other stages", stages[~stages["stage"].isin(named)], {"color": theme.GREY, "marker": "."}),
        *((name, stages[stages["stage"] == name], {"color": colour, "marker": marker})
          for name, colour, marker in zip(named, theme.SERIES, theme.MARKERS, strict=False)),
        (WHOLE, wholes, {"color": theme.BLACK, "marker": "*", "markersize": 9}),
    ]  # fmt: skip
    if several is not None and len(several):
        hollow = {"color": theme.VERMILLION, "marker": "*", "markersize": 11, "markerfacecolor": "none"}
        groups.append(("whole round on several GPUs", several, hollow))
    entries = {}
    for label, group, style in groups:
        entries[label] = upper.plot(group["measured_us"], group["fitted_us"], linestyle="none", **style)[0]
        lower.plot(group["measured_us"], 100 * group["residual"], linestyle="none", **style)
    ends = [points["measured_us"].min(), points["measured_us"].max()]
    upper.plot(ends, ends, color=theme.PALE, zorder=0)
    lower.axhspan(-100 * _BAND, 100 * _BAND, color=theme.PALE, alpha=0.4, zorder=0)
    upper.set_xscale("log")
    upper.set_yscale("log")
    theme.style_axes(upper, title="", xlabel="", ylabel="fitted, µs")
    theme.style_axes(lower, title="", xlabel="measured, µs", ylabel="fit is off by, %")
    theme.add_figure_heading(figure, title, entries, num_columns=4)
    theme.add_figure_caption(figure, provenance, notes)
    return figure


def plot_speed_panels(
    speeds: Mapping[tuple[str, str], pd.DataFrame], *, title: str = "Speed by budget",
    provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Figure:  # fmt: skip
    """Draw tokens per second against drafted tokens, a panel a (row, column): trees and chains, the rest as lines.

    Args:
        speeds: of `kdlab.study.phase.arm_speeds` by (name of the row, name of the column).
        title: of the figure.
        provenance: adds the line that says on what it was measured.
        notes: put before the provenance.
    """
    rows, columns = (list(dict.fromkeys(key[part] for key in speeds)) for part in (0, 1))
    figure = Figure(figsize=(theme.REPORT_INCHES, 0.9 + 2.2 * len(rows)), facecolor="white", layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True)
    entries: dict[str, Any] = {}
    for (row, column), table in speeds.items():
        ax = axes[rows.index(row)][columns.index(column)]
        entries |= _draw_speeds(ax, table)
        at_left, at_bottom = column == columns[0], row == rows[-1]
        theme.style_axes(
            ax, title=f"{column}, {row}", xlabel="draft tokens a round" if at_bottom else "",
            ylabel="tokens/s, all streams" if at_left else "",
        )  # fmt: skip
        ax.title.set_fontsize(theme.LABEL_PT)
    theme.add_figure_heading(figure, title, entries, num_columns=5)
    missing = beyond_notes(pd.concat([table["tok_s"] for table in speeds.values()]))
    theme.add_figure_caption(figure, provenance, [*missing, *notes])
    return figure


def plot_gpus(
    phases: Mapping[str, pd.DataFrame], *, measured: Sequence[str] = (), title: str = "What a tree gains, by GPU",
    provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Figure:  # fmt: skip
    """Draw the range of gains of each comparison on each GPU, a panel a number of streams.

    Args:
        phases: of `kdlab.study.phase.phase_table` by the GPU's name; a range is over what else varies in it.
        measured: GPUs whose times are fitted to measured ones; the others are labelled as predicted, and drawn hollow.
        title: of the figure.
        provenance: adds the line that says on what it was measured.
        notes: put before the provenance.
    """
    first = next(iter(phases.values()))
    streams, comparisons = list(first["streams"].unique()), list(first["comparison"].unique())
    figure = Figure(figsize=(theme.REPORT_INCHES, 1.5 + 0.62 * len(phases)), facecolor="white", layout="constrained")
    axes = figure.subplots(1, len(streams), squeeze=False, sharey=True, sharex=True)[0]
    entries: dict[str, Any] = {}
    for ax, count in zip(axes, streams, strict=True):
        ax.axvline(0.0, color=theme.GREY, linewidth=0.8)
        for place, (name, table) in enumerate(phases.items()):
            for step, (comparison, colour) in enumerate(zip(comparisons, theme.SERIES, strict=False)):
                gains = 100 * table.loc[(table["streams"] == count) & (table["comparison"] == comparison), "gain"]
                fill = colour if name in measured else "white"
                y = place + 0.22 * (step - 1)
                ends, marks = [gains.min(), gains.max()], [gains.min(), gains.median(), gains.max()]
                ax.plot(ends, [y, y], color=colour, linewidth=1.4)
                mark = ax.plot(marks, [y] * 3, linestyle="none", marker="o", color=colour, markerfacecolor=fill)[0]
                entries.setdefault(comparison, mark)
        theme.style_axes(ax, title=streams_text(count), xlabel="gain, % (lowest, median, highest)", ylabel="", grid="x")
    labels = [name if name in measured else f"{name},\npredicted" for name in phases]
    axes[0].set_yticks(range(len(phases)), labels)
    axes[0].invert_yaxis()
    theme.add_figure_heading(figure, title, entries, num_columns=1)
    theme.add_figure_caption(figure, provenance, notes)
    return figure


def _draw_speeds(ax: Axes, speeds: pd.DataFrame) -> dict[str, Any]:
    entries = {}
    for method, colour, marker, label in (
        ("ddtree", theme.TREE, "o", "tree, by its budget"), ("chain", theme.CHAIN, "s", "chain, by its length"),
    ):  # fmt: skip
        arms = speeds[speeds["method"] == method].sort_values("setting")
        entries[label] = ax.plot(arms["setting"], arms["tok_s"], color=colour, marker=marker, markersize=4)[0]
    for method, colour, style, label in (
        ("adaptive_tree", theme.TREE, "--", "best adaptive tree"),
        ("adaptive_chain", theme.CHAIN, "--", "best adaptive chain"), ("ar", theme.AR, ":", "AR"),
    ):  # fmt: skip
        arms = speeds.loc[speeds["method"] == method, "tok_s"]
        if len(arms):
            entries[label] = ax.axhline(arms.max(), color=colour, linestyle=style)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylim(bottom=0.0)
    return entries
