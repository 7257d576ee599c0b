"""The budget sweep: acceptance, cost and their quotient against the rows that a round verifies."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kdlab.study import BestBudget
from kdlab.viz import theme
from kdlab.viz.arms import STYLES, ArmStyle, arm_label, arm_style, is_hollow, mark_flags
from kdlab.viz.wording import best_sentence

ROWS_LABEL = "rows: tokens verified a round (budget + 1)"
TOKENS_LABEL = "tokens per round, bonus included"
_MOST_MARKERS = 20


def plot_tokens_per_round(
    summary: pd.DataFrame, ax: Axes | None = None, *, title: str = "Acceptance",
    legend: bool = True, provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw tokens per round of every method, with its bootstrap interval, against the rows that a round verifies.

    Args:
        summary: from `kdlab.study.summarize`, one row a (method, setting).
        ax: where to draw; a new figure when None.
        title: of the figure.
        legend: explain the marks on the drawing.
        provenance: adds the line that says on what the numbers were made.
    """
    ax = theme.new_axes(ax)
    _draw_methods(ax, summary, "tokens_per_round", "tokens_per_round_low", "tokens_per_round_high")
    rows_axis(ax, summary["rows_per_round"])
    ax.set_ylim(bottom=0.0)
    theme.style_axes(ax, title=title, xlabel=ROWS_LABEL, ylabel=TOKENS_LABEL)
    mark_flags(ax, summary)
    if legend:
        theme.add_legend(ax, loc="lower right")
    theme.add_caption(ax, provenance)
    return ax


def plot_cost(
    cost: pd.DataFrame, ax: Axes | None = None, *, title: str = "Cost", legend: bool = True,
    provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw measured round times, median with p10 to p90, against the rows that a round verifies.

    Args:
        cost: rows of a `kdlab.study.CostTable`.
        ax: where to draw; a new figure when None.
        title: of the figure.
        legend: explain the marks on the drawing.
        provenance: adds the line that says on what the times were measured.
    """
    ax = theme.new_axes(ax)
    table = cost.assign(rows_per_round=cost["rows"])
    _draw_methods(ax, table, "round_ms", "round_ms_p10", "round_ms_p90", bars=True)
    rows_axis(ax, table["rows_per_round"])
    ax.set_ylim(bottom=0.0)
    streams = int(cost["streams"].iloc[0])
    together = "" if streams == 1 else f", {streams} streams together"
    theme.style_axes(ax, title=title, xlabel=ROWS_LABEL, ylabel=f"ms a round{together} (median, p10 to p90)")
    mark_flags(ax, table)
    if legend:
        theme.add_legend(ax, loc="best")
    theme.add_caption(ax, provenance)
    return ax


def plot_speed(
    speed: pd.DataFrame, ax: Axes | None = None, *, best: BestBudget | None = None, title: str | None = None,
    name_methods: bool = True, legend: bool = True, provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw tokens per second, the quotient of acceptance and cost, with AR and the best control as lines.

    Filled points were timed; a line is dashed where the round time between them is interpolated. Bars are the
    bootstrap interval of the acceptance over prompts, at the median round time.

    Args:
        speed: from `kdlab.study.speed`; arms without a round time are left out.
        ax: where to draw; a new figure when None.
        best: from `kdlab.study.best_budget`: marked, and named in the title.
        title: in place of the sentence about `best`.
        name_methods: whether the legend names the methods; needless beside a figure that does.
        legend: explain the marks on the drawing.
        provenance: adds the line that says on what the numbers were made.
    """
    ax = theme.new_axes(ax)
    table = speed[speed["tok_s"].notna()].copy()
    for bound in ("low", "high"):
        table[f"tok_s_{bound}"] = table["tok_s"] * table[f"tokens_per_round_{bound}"] / table["tokens_per_round"]
    _draw_methods(ax, table, "tok_s", "tok_s_low", "tok_s_high", bars=True, named=name_methods)
    rows_axis(ax, table["rows_per_round"])
    if best is not None:
        _draw_best(ax, best)
    ax.set_ylim(bottom=0.0)
    heading = "Speed" if best is None else theme.wrapped(best_sentence(best), theme.figure_of(ax).get_figwidth())
    heading = heading if title is None else title
    theme.style_axes(ax, title=heading, xlabel=ROWS_LABEL, ylabel="tokens per second")
    mark_flags(ax, table)
    if legend:
        theme.add_legend(ax, loc="best")
    theme.add_caption(ax, provenance)
    return ax


def plot_budget_sweep(
    summary: pd.DataFrame, cost: pd.DataFrame, speed: pd.DataFrame, best: BestBudget,
    axes: Sequence[Axes] | None = None, *, provenance: Mapping[str, Any] | None = None, notes: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """Draw the three curves side by side: acceptance, cost, and their quotient, with one legend above them.

    The headline names the best budget in numbers; whether that is a gain is for `kdlab.viz.verdict` to say.

    Args:
        summary: from `kdlab.study.summarize`.
        cost: rows of a `kdlab.study.CostTable`.
        speed: from `kdlab.study.speed`.
        best: from `kdlab.study.best_budget`.
        axes: three axes of one figure; a new figure when None.
        provenance, notes: for the caption below the figure.
    """
    if axes is None:
        figure = Figure(figsize=(theme.REPORT_INCHES, 5.2), facecolor="white", layout="constrained")
        axes = figure.subplots(1, 3)
    first, second, third = axes
    plot_tokens_per_round(summary, first, title="Acceptance", legend=False)
    plot_cost(cost, second, title="÷ cost", legend=False)
    plot_speed(speed, third, best=best, title="= speed", name_methods=False, legend=False)
    for ax in axes:
        ax.set_xlabel("rows: tokens verified\na round (budget + 1)")
    whole = theme.figure_of(first)
    theme.add_figure_heading(whole, best_sentence(best), _entries(axes), num_columns=3, weight="bold")
    theme.add_figure_caption(whole, provenance, notes)
    return whole


def _draw_methods(
    ax: Axes, table: pd.DataFrame, value: str, low: str, high: str, *, bars: bool = False, named: bool = True
) -> None:
    """One line a method over rows_per_round, with bars or a band from `low` to `high`; flagged points are hollow."""
    for method in STYLES:
        rows = table[(table["method"] == method) & table[value].notna()].sort_values("rows_per_round")
        if rows.empty:
            continue
        style = arm_style(method)
        points = _marked(rows)
        _draw_line(ax, rows, style, value)
        _draw_points(ax, points, method, value, style.legend if named else "_")
        drawn = points if bars else rows
        known = drawn[drawn[low].notna() & drawn[high].notna()]
        if bars or len(known) == 1:
            spread = [known[value] - known[low], known[high] - known[value]]
            ax.errorbar(known["rows_per_round"], known[value], yerr=np.maximum(spread, 0.0), fmt="none", capsize=2.5,
                        ecolor=style.colour, elinewidth=1.0, zorder=2)  # fmt: skip
        else:
            ax.fill_between(known["rows_per_round"], known[low], known[high], color=style.colour, alpha=0.16, zorder=1,
                            linewidth=0)  # fmt: skip


def _draw_line(ax: Axes, rows: pd.DataFrame, style: ArmStyle, value: str) -> None:
    """Full between two measured points, dashed where one of them has an interpolated round time."""
    x, y = rows["rows_per_round"].to_numpy(dtype=float), rows[value].to_numpy(dtype=float)
    measured = _measured(rows).to_numpy()
    solid = measured[1:] & measured[:-1]
    starts = [0, *(np.flatnonzero(np.diff(solid)) + 1), len(solid)]
    for start, end in pairwise(starts):
        line: Any = style.line if solid[start:end].all() else (0, (3.0, 1.6))
        ax.plot(x[start : end + 1], y[start : end + 1], color=style.colour, linestyle=line, linewidth=1.6, zorder=3)


def _draw_points(ax: Axes, rows: pd.DataFrame, method: str, value: str, label: str) -> None:
    style = arm_style(method)
    hollow = is_hollow(rows)
    common: dict[str, Any] = {"linestyle": "none", "marker": style.marker, "color": style.colour, "markersize": 5.5}
    filled = rows[~hollow]
    ax.plot(filled["rows_per_round"], filled[value], label=label, zorder=4, **common)
    ax.plot(rows.loc[hollow, "rows_per_round"], rows.loc[hollow, value], markerfacecolor="white", zorder=4,
            **common)  # fmt: skip


def _measured(rows: pd.DataFrame) -> pd.Series:
    if "cost_source" not in rows:
        return pd.Series(True, index=rows.index)
    return rows["cost_source"] == "measured"


def _draw_best(ax: Axes, best: BestBudget) -> None:
    control = arm_style(best.control_method)
    ax.axhline(best.control_tok_s, color=control.colour, linestyle=":", linewidth=1.2, zorder=2,
               label=f"best control: {arm_label(best.control_method, best.control_setting)}")  # fmt: skip
    if best.control_method != "ar" and not np.isnan(best.margin_over_ar):
        ax.axhline(best.tok_s / (1.0 + best.margin_over_ar), color=theme.AR, linestyle=":", linewidth=1.2, zorder=2)
    timed = "" if best.budget_interpolated else "timed "
    ax.plot([best.budget + 1], [best.tok_s], marker="*", markersize=15, color=theme.TREE, markeredgecolor="white",
            linestyle="none", zorder=6, label=f"best {timed}budget: {best.budget}")  # fmt: skip


def rows_axis(ax: Axes, rows: pd.Series) -> None:
    """A log2 axis with a tick at every power of two, so that budgets 7, 15, 31 stand on ticks."""
    largest = float(rows.max()) if len(rows) else 1.0
    top = max(1, int(np.ceil(np.log2(max(largest, 2.0)) - 0.1)))
    ax.set_xscale("log", base=2)
    ax.set_xlim(2.0**-0.25, 2.0 ** (top + 0.25))
    ax.xaxis.set_major_locator(FixedLocator([2.0**power for power in range(top + 1)]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _marked(rows: pd.DataFrame) -> pd.DataFrame:
    """The points to mark: all of a few; of many, those that were timed, or those nearest to powers of two."""
    if len(rows) <= _MOST_MARKERS:
        return rows
    if "cost_source" in rows:
        return rows[_measured(rows)]
    values = rows["rows_per_round"].to_numpy(dtype=float)
    powers = 2.0 ** np.arange(int(np.log2(max(values.max(), 1.0))) + 1)
    return rows.iloc[np.unique(np.abs(values[:, None] - powers).argmin(axis=0))]


def _entries(axes: Sequence[Axes]) -> dict[str, Any]:
    """The legend entries of all panels, each label once."""
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    return entries
