"""The budget sweep: acceptance, cost and their quotient against the rows that a round verifies."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kdlab.study import BestBudget
from kdlab.viz import theme
from kdlab.viz.arms import STYLES, arm_label, arm_style, is_hollow, mark_flags

ROWS_LABEL = "rows verified a round (budget + 1)"
TOKENS_LABEL = "tokens per round, bonus included"
_MOST_MARKERS = 20


def plot_tokens_per_round(
    summary: pd.DataFrame, ax: Axes | None = None, *, title: str = "Acceptance",
    provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw tokens per round of every method, with its bootstrap interval, against the rows that a round verifies.

    Args:
        summary: from `kdlab.study.summarize`, one row a (method, setting).
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what the numbers were made.
    """
    ax = theme.new_axes(ax)
    _draw_methods(ax, summary, "tokens_per_round", "tokens_per_round_low", "tokens_per_round_high")
    _rows_axis(ax, summary["rows_per_round"])
    ax.set_ylim(bottom=0.0)
    theme.style_axes(ax, title=title, xlabel=ROWS_LABEL, ylabel=TOKENS_LABEL)
    mark_flags(ax, summary)
    theme.add_legend(ax, loc="lower right")
    theme.add_caption(ax, provenance)
    return ax


def plot_cost(
    cost: pd.DataFrame, ax: Axes | None = None, *, title: str = "Cost", provenance: Mapping[str, Any] | None = None
) -> Axes:
    """Draw measured round times, median with p10 to p90, against the rows that a round verifies.

    Args:
        cost: rows of a `kdlab.study.CostTable`.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what the times were measured.
    """
    ax = theme.new_axes(ax)
    table = cost.assign(rows_per_round=cost["rows"])
    _draw_methods(ax, table, "round_ms", "round_ms_p10", "round_ms_p90", bars=True)
    _rows_axis(ax, table["rows_per_round"])
    ax.set_ylim(bottom=0.0)
    streams = int(cost["streams"].iloc[0])
    together = "" if streams == 1 else f", {streams} streams together"
    theme.style_axes(ax, title=title, xlabel=ROWS_LABEL, ylabel=f"ms a round{together} (median, p10 to p90)")
    mark_flags(ax, table)
    theme.add_legend(ax, loc="best")
    theme.add_caption(ax, provenance)
    return ax


def plot_speed(
    speed: pd.DataFrame, ax: Axes | None = None, *, best: BestBudget | None = None, title: str | None = None,
    name_methods: bool = True, provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw tokens per second, the quotient of acceptance and cost, with AR and the best control as lines.

    Bars are the bootstrap interval of the acceptance over prompts, at the median round time.

    Args:
        speed: from `kdlab.study.speed`; arms without a round time are left out.
        ax: where to draw; a new figure when None.
        best: from `kdlab.study.best_budget`: marked, and named in the title.
        title: in place of the sentence about `best`.
        name_methods: whether the legend names the methods; needless beside a figure that does.
        provenance: adds the line that says on what the numbers were made.
    """
    ax = theme.new_axes(ax)
    table = speed[speed["tok_s"].notna()].copy()
    for bound in ("low", "high"):
        table[f"tok_s_{bound}"] = table["tok_s"] * table[f"tokens_per_round_{bound}"] / table["tokens_per_round"]
    _draw_methods(ax, table, "tok_s", "tok_s_low", "tok_s_high", bars=True, named=name_methods)
    _rows_axis(ax, table["rows_per_round"])
    if best is not None:
        _draw_best(ax, best)
    ax.set_ylim(bottom=0.0)
    heading = title if title is not None else "Speed" if best is None else best_sentence(best)
    theme.style_axes(ax, title=heading, xlabel=ROWS_LABEL, ylabel="tokens per second")
    mark_flags(ax, table)
    theme.add_legend(ax, loc="best")
    theme.add_caption(ax, provenance)
    return ax


def plot_budget_sweep(
    summary: pd.DataFrame, cost: pd.DataFrame, speed: pd.DataFrame, best: BestBudget,
    axes: Sequence[Axes] | None = None, *, provenance: Mapping[str, Any] | None = None, notes: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """Draw the three curves side by side: acceptance, cost, and their quotient with the best budget in the headline.

    Args:
        summary: from `kdlab.study.summarize`.
        cost: rows of a `kdlab.study.CostTable`.
        speed: from `kdlab.study.speed`.
        best: from `kdlab.study.best_budget`.
        axes: three axes of one figure; a new figure when None.
        provenance, notes: for the caption below the figure.
    """
    if axes is None:
        figure = Figure(figsize=(13.0, 4.6), facecolor="white", layout="constrained")
        axes = figure.subplots(1, 3)
    first, second, third = axes
    plot_tokens_per_round(summary, first, title="Acceptance")
    plot_cost(cost, second, title="÷ cost")
    plot_speed(speed, third, best=best, title="= speed", name_methods=False)
    whole = theme.figure_of(first)
    whole.suptitle(theme.drawable(best_sentence(best)), x=0.01, ha="left", fontsize=theme.TITLE_PT + 1.0,
                   color=theme.BLACK, weight="bold", parse_math=False)  # fmt: skip
    theme.add_figure_caption(whole, provenance, notes)
    return whole


def plot_by_kind(
    summary: pd.DataFrame, ax: Axes | None = None, *, title: str = "Acceptance by kind of text",
    loops: Collection[str] = (), provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw tokens per round of DDTree (full lines) and chains (dashed) for each kind of text.

    Args:
        summary: from `kdlab.study.summarize` by method, setting and kind.
        ax: where to draw; a new figure when None.
        loops: kinds whose text repeats itself, which the legend says.
        title: of the figure.
        provenance: adds the line that says on what the numbers were made.
    """
    ax = theme.new_axes(ax)
    for number, (kind, group) in enumerate(summary.groupby("kind", sort=False)):
        colour, marker = theme.SERIES[number % len(theme.SERIES)], theme.MARKERS[number % len(theme.MARKERS)]
        for method, style in (("ddtree", "-"), ("chain", "--")):
            rows = group[group["method"] == method].sort_values("rows_per_round")
            prompts = int(group["num_prompts"].iloc[0])
            named = f"{kind} ({prompts} prompt{'s' if prompts != 1 else ''}{', a loop' if kind in loops else ''})"
            label = named if method == "ddtree" else None
            every = max(1, len(rows) // 8)
            ax.plot(rows["rows_per_round"], rows["tokens_per_round"], linestyle=style, color=colour, marker=marker,
                    markevery=every, markersize=5.0, linewidth=1.6 if style == "-" else 1.0, label=label)  # fmt: skip
    _rows_axis(ax, summary["rows_per_round"])
    ax.set_ylim(bottom=0.0)
    theme.style_axes(ax, title=title, xlabel=ROWS_LABEL, ylabel=TOKENS_LABEL)
    mark_flags(ax, summary)
    theme.add_legend(ax, loc="upper left", title="full: DDTree, dashed: chain", title_fontsize=theme.TICK_PT)
    theme.add_caption(ax, provenance)
    return ax


def best_sentence(best: BestBudget) -> str:
    """Name the best budget, its speed, its margin over the best control, that margin's interval and what it allows."""
    control = arm_label(best.control_method, best.control_setting)
    over = "over" if best.margin >= 0 else "against"
    return (
        f"Best budget {best.budget}: {best.tok_s:,.0f} tokens/s, {percent(best.margin)} {over} the best control "
        f"({control})\n{_certainty(best)}"
    )


def percent(share: float) -> str:
    """Write a share as a signed percentage."""
    return f"{100.0 * share:+.{0 if abs(share) >= 0.0995 else 1}f} %".replace("-", "−")


def _certainty(best: BestBudget) -> str:
    if np.isnan(best.margin_low):
        return f"No interval: {best.num_prompts} prompts are too few to tell."
    verdict = "a gain" if best.margin_low > 0 else "a loss" if best.margin_high < 0 else "gain or loss is not settled"
    between = f"{percent(best.margin_low)} to {percent(best.margin_high)}"
    times = "round times taken as exact"
    return f"{100.0 * best.level:.0f} % interval over {best.num_prompts} prompts, {times}: {between}: {verdict}."


def _draw_methods(
    ax: Axes, table: pd.DataFrame, value: str, low: str, high: str, *, bars: bool = False, named: bool = True
) -> None:
    """One line a method over rows_per_round, with bars or a band from `low` to `high`; flagged points are hollow."""
    for method in STYLES:
        rows = table[(table["method"] == method) & table[value].notna()].sort_values("rows_per_round")
        if rows.empty:
            continue
        style, x, y = arm_style(method), rows["rows_per_round"], rows[value]
        points = rows.iloc[_marked(x)] if len(rows) > _MOST_MARKERS else rows
        ax.plot(x, y, color=style.colour, linestyle=style.line, linewidth=1.8, zorder=3)
        _draw_points(ax, points, method, value, style.name if named else "_")
        drawn = points if bars else rows
        known = drawn[drawn[low].notna() & drawn[high].notna()]
        if bars or len(known) == 1:
            spread = [known[value] - known[low], known[high] - known[value]]
            ax.errorbar(known["rows_per_round"], known[value], yerr=np.maximum(spread, 0.0), fmt="none", capsize=2.5,
                        ecolor=style.colour, elinewidth=1.0, zorder=2)  # fmt: skip
        else:
            ax.fill_between(known["rows_per_round"], known[low], known[high], color=style.colour, alpha=0.16, zorder=1,
                            linewidth=0)  # fmt: skip


def _draw_points(ax: Axes, rows: pd.DataFrame, method: str, value: str, label: str) -> None:
    style = arm_style(method)
    hollow = is_hollow(rows)
    common: dict[str, Any] = {"linestyle": "none", "marker": style.marker, "color": style.colour, "markersize": 5.5}
    filled = rows[~hollow]
    ax.plot(filled["rows_per_round"], filled[value], label=label, zorder=4, **common)
    ax.plot(rows.loc[hollow, "rows_per_round"], rows.loc[hollow, value], markerfacecolor="white", zorder=4,
            **common)  # fmt: skip


def _draw_best(ax: Axes, best: BestBudget) -> None:
    control = arm_style(best.control_method)
    ax.axhline(best.control_tok_s, color=control.colour, linestyle=":", linewidth=1.2, zorder=2,
               label=f"best control: {arm_label(best.control_method, best.control_setting)}")  # fmt: skip
    if best.control_method != "ar" and not np.isnan(best.margin_over_ar):
        ax.axhline(best.tok_s / (1.0 + best.margin_over_ar), color=theme.AR, linestyle=":", linewidth=1.2, zorder=2)
    ax.plot([best.budget + 1], [best.tok_s], marker="*", markersize=15, color=theme.TREE, markeredgecolor="white",
            linestyle="none", zorder=6, label=f"best budget: {best.budget}")  # fmt: skip


def _rows_axis(ax: Axes, rows: pd.Series) -> None:
    """A log2 axis with a tick at every power of two, so that budgets 7, 15, 31 stand on ticks."""
    largest = float(rows.max()) if len(rows) else 1.0
    top = max(1, int(np.ceil(np.log2(max(largest, 2.0)) - 0.1)))
    ax.set_xscale("log", base=2)
    ax.set_xlim(2.0**-0.25, 2.0 ** (top + 0.25))
    ax.xaxis.set_major_locator(FixedLocator([2.0**power for power in range(top + 1)]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _marked(x: pd.Series) -> np.ndarray:
    """Positions of the points nearest to powers of two: a dense curve carries a marker at each tick."""
    values = x.to_numpy(dtype=float)
    powers = 2.0 ** np.arange(int(np.log2(max(values.max(), 1.0))) + 1)
    return np.unique(np.abs(values[:, None] - powers).argmin(axis=0))
