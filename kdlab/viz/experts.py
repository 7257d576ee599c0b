"""What a verified token reads on a sparse model: distinct experts by rows, and bytes by stage."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

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


def plot_expert_curves(
    curves: pd.DataFrame, ax: Axes | None = None, *, num_experts: int, independent: Mapping[int, float],
    exponents: Mapping[str, float] | None = None, title: str = "Distinct experts by rows",
    provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw how many distinct experts of a layer n rows use together, a line a kind of rows.

    Args:
        curves: of `kdlab.study.expert_curves.expert_curve`, several kinds together; the mean over layers is drawn.
        ax: where to draw; a new figure when None.
        num_experts: E, the dotted line on top.
        independent: experts of independent routing by rows, the dashed line.
        exponents: g of each kind, for the legend.
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
        g = (exponents or {}).get(str(kind))
        label += "" if g is None else f" (g {g:.2f})"
        ax.plot(mean.index, mean, color=colour, marker=marker, label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(rows, [str(n) for n in rows])
    theme.style_axes(ax, title=title, xlabel="rows verified together", ylabel="distinct experts of a layer (mean)")
    theme.add_legend(ax)
    theme.add_caption(ax, provenance, notes)
    return ax


def plot_step_bytes(
    table: pd.DataFrame, ax: Axes | None = None, *, totals: Mapping[str, Mapping[int, float]] | None = None,
    title: str = "Bytes of a round by rows", provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw the bytes of a round as stacked bars, a bar a number of rows; the largest stages by name, the rest as one.

    Args:
        table: columns rows, stage and bytes.
        totals: bytes of whole rounds by rows under other assumptions, a mark each, by what they assume.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says where the shapes are from.
        notes: put before the provenance.
    """
    wide = table.pivot_table(index="rows", columns="stage", values="bytes", aggfunc="sum", sort=False).fillna(0.0)
    order = wide.sum().sort_values(ascending=False).index
    named, rest = list(order[:_MOST_STAGES]), list(order[_MOST_STAGES:])
    parts = wide[named].assign(**({"all else": wide[rest].sum(axis=1)} if rest else {})) / 2**30
    ax = theme.new_axes(ax)
    places, base = np.arange(len(parts)), np.zeros(len(parts))
    for name, colour in zip(parts.columns, (*theme.SERIES, theme.PALE), strict=False):
        ax.bar(places, parts[name], bottom=base, color=colour, width=0.72, label=name)
        base = base + parts[name].to_numpy()
    for (label, by_rows), marker in zip((totals or {}).items(), ("v", "^", "D"), strict=False):
        sizes = [by_rows[rows] / 2**30 for rows in parts.index]
        ax.plot(places, sizes, linestyle="none", marker=marker, markersize=7, color=theme.BLACK,
                markerfacecolor="white", label=label)  # fmt: skip
    ax.set_xticks(places, [str(rows) for rows in parts.index])
    theme.style_axes(ax, title=title, xlabel="rows verified together", ylabel="GiB a round and rank", grid="y")
    theme.add_legend(ax, loc="upper left")
    theme.add_caption(ax, provenance, notes)
    return ax
