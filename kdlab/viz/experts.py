"""What a verified token costs on a sparse model: distinct experts by rows, bytes by stage, and where a tree pays."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from kdlab.errors import ArgumentError
from kdlab.viz import theme

_KINDS = {
    "strangers": (theme.GREY, "X", "tokens of different texts"),
    "text": (theme.BLACK, "o", "tokens that follow one another"),
    "chain": (theme.VERMILLION, "s", "a chain's rows"),
    "siblings": (theme.PURPLE, "D", "siblings"),
    "tree": (theme.BLUE, "^", "a tree's rows, best first"),
}
_MOST_STAGES = 6
_COLOUR_SPAN = 0.3
"""Gain at which the colour of the phase diagram ends."""


def plot_expert_curves(
    curves: pd.DataFrame, ax: Axes | None = None, *, num_experts: int, independent: Mapping[int, float],
    title: str = "Distinct experts by rows", provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw how many distinct experts of a layer n rows use together, a line a kind of rows.

    Args:
        curves: of `kdlab.study.expert_curves.expert_curve`, several kinds together; the mean over layers is drawn.
        ax: where to draw; a new figure when None.
        num_experts: E, the dotted line on top.
        independent: experts of independent routing by rows, the dashed line.
        title: of the figure.
        provenance: adds the line that says on what it was recorded.
        notes: put before the provenance.
    """
    if curves.empty:
        raise ArgumentError("curves", "at least one row", "none")
    ax = theme.new_axes(ax)
    rows = sorted(independent)
    ax.plot(rows, [independent[n] for n in rows], color=theme.GREY, linestyle="--", label="independent routing")
    ax.axhline(num_experts, color=theme.PALE, linestyle=":", label="all experts")
    for kind, group in curves.groupby("kind", sort=False):
        colour, marker, label = _KINDS[str(kind)]
        mean = group.groupby("rows")["distinct"].mean()
        ax.plot(mean.index, mean, color=colour, marker=marker, label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(rows, [str(n) for n in rows])
    theme.style_axes(ax, title=title, xlabel="rows verified together", ylabel="distinct experts of a layer (mean)")
    theme.add_legend(ax)
    theme.add_caption(ax, provenance, notes)
    return ax


def plot_step_bytes(
    table: pd.DataFrame, ax: Axes | None = None, *, title: str = "Bytes of a round by rows",
    provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw the bytes of a round as stacked bars, a bar a number of rows; the largest stages by name, the rest as one.

    Args:
        table: columns rows, stage and bytes.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says where the shapes are from.
        notes: put before the provenance.
    """
    wide = table.pivot_table(index="rows", columns="stage", values="bytes", aggfunc="sum", sort=False)
    order = wide.sum().sort_values(ascending=False).index
    named, rest = list(order[:_MOST_STAGES]), list(order[_MOST_STAGES:])
    parts = wide[named].assign(**({"all else": wide[rest].sum(axis=1)} if rest else {})) / 2**30
    ax = theme.new_axes(ax)
    places, base = np.arange(len(parts)), np.zeros(len(parts))
    for name, colour in zip(parts.columns, (*theme.SERIES, theme.PALE), strict=False):
        ax.bar(places, parts[name], bottom=base, color=colour, width=0.72, label=name)
        base = base + parts[name].to_numpy()
    ax.set_xticks(places, [str(rows) for rows in parts.index])
    theme.style_axes(ax, title=title, xlabel="rows verified together", ylabel="GiB a round and rank", grid="y")
    theme.add_legend(ax)
    theme.add_caption(ax, provenance, notes)
    return ax


def plot_arm_speeds(
    speeds: pd.DataFrame, ax: Axes | None = None, *, title: str = "Speed by budget",
    provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw tokens per second by budget for trees and chains, with AR and the best adaptive chain as lines.

    Args:
        speeds: of `kdlab.study.phase.arm_speeds`.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what it was measured.
        notes: put before the provenance.
    """
    ax = theme.new_axes(ax)
    for method, colour, marker, label in (
        ("ddtree", theme.TREE, "o", "tree, by its budget"), ("chain", theme.CHAIN, "s", "chain, by its length"),
    ):  # fmt: skip
        arms = speeds[speeds["method"] == method].sort_values("setting")
        ax.plot(arms["setting"], arms["tok_s"], color=colour, marker=marker, label=label)
    for method, colour, style, label in (
        ("adaptive_chain", theme.CHAIN, "--", "best adaptive chain"), ("ar", theme.AR, ":", "AR"),
    ):  # fmt: skip
        arms = speeds.loc[speeds["method"] == method, "tok_s"]
        if len(arms):
            ax.axhline(arms.max(), color=colour, linestyle=style, label=label)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    theme.style_axes(ax, title=title, xlabel="draft tokens a round", ylabel="tokens per second, all streams")
    theme.add_legend(ax)
    theme.add_caption(ax, provenance, notes)
    return ax


def plot_phase(
    phases: pd.DataFrame, *, title: str = "What the best tree gains over the best control",
    marks: Sequence[tuple[float, int, str]] = (), provenance: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
) -> Figure:  # fmt: skip
    """Draw a phase diagram, a panel a profile and context: streams to the right, routing upwards, gain as colour.

    Each field says the gain in percent and the budget that reaches it; a field where the tree loses is red.

    Args:
        phases: of `kdlab.study.phase.phase_table`.
        title: of the figure.
        marks: (g, streams, label) of points that were measured somewhere, drawn into every panel.
        provenance: adds the line that says on what it was measured.
        notes: put before the provenance.
    """
    profiles, contexts = list(phases["profile"].unique()), list(phases["context"].unique())
    size = (theme.REPORT_INCHES, 0.9 + 1.9 * len(profiles))
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    axes = figure.subplots(len(profiles), len(contexts), squeeze=False, sharex=True, sharey=True)
    for row, profile in enumerate(profiles):
        for column, context in enumerate(contexts):
            panel = phases[(phases["profile"] == profile) & (phases["context"] == context)]
            _draw_phase(axes[row][column], panel, marks)
            theme.style_axes(
                axes[row][column], title=f"{profile}, context {context:,}", grid="none",
                xlabel="streams" if row == len(profiles) - 1 else "", ylabel="routing g" if column == 0 else "",
            )  # fmt: skip
    theme.add_figure_heading(figure, title, {}, num_columns=1)
    theme.add_figure_caption(figure, provenance, notes)
    return figure


def _draw_phase(ax: Axes, panel: pd.DataFrame, marks: Sequence[tuple[float, int, str]]) -> None:
    gains = panel.pivot(index="g", columns="streams", values="gain")
    budgets = panel.pivot(index="g", columns="streams", values="budget")
    norm = TwoSlopeNorm(0.0, vmin=-_COLOUR_SPAN, vmax=_COLOUR_SPAN)
    ax.imshow(gains.to_numpy(), cmap="RdBu", norm=norm, aspect="auto", origin="lower")
    for (row, column), gain in np.ndenumerate(gains.to_numpy()):
        text = f"{100 * gain:+.0f} %\nB {budgets.iat[row, column]:g}"
        colour = "white" if abs(gain) > 0.7 * _COLOUR_SPAN else theme.BLACK
        ax.text(column, row, text, ha="center", va="center", fontsize=theme.TICK_PT - 2, color=colour)
    ax.set_xticks(range(len(gains.columns)), [str(count) for count in gains.columns])
    ax.set_yticks(range(len(gains.index)), [f"{g:g}" for g in gains.index])
    for g, streams, label in marks:
        if streams in gains.columns:
            x = list(gains.columns).index(streams)
            y = float(np.interp(g, gains.index, range(len(gains.index))))
            ax.plot([x + 0.38], [y], marker="*", color=theme.ORANGE, markeredgecolor=theme.BLACK, label=label)
