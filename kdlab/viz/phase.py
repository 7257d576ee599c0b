"""Where a tree pays: gains as colour over text, routing, streams, context and budget."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kdlab.errors import ArgumentError
from kdlab.study.phase import OPEN
from kdlab.viz import theme
from kdlab.viz.wording import beyond_notes, streams_text

_SPAN = 0.15
"""Gain at which the colour ends: what is above is as blue."""
_NORM, _COLOURS = TwoSlopeNorm(0.0, vmin=-_SPAN, vmax=_SPAN), "RdBu"
_LOG_SPAN = 1.6
_FACTORS = TwoSlopeNorm(0.0, vmin=-_LOG_SPAN, vmax=_LOG_SPAN)  # of the logarithm of a factor


@dataclass(frozen=True, slots=True)
class Mark:
    """A point that was measured somewhere: its place on the line of workloads, and its g where it is known."""

    label: str
    place: float
    g: float | None = None


def plot_regions(
    phases: pd.DataFrame, rows: str, *, marks: Sequence[Mark] = (), xlabel: str,
    title: str = "What the best tree gains", provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Figure:  # fmt: skip
    """Draw gains over text (to the right) and routing (upwards), a column of panels a number of streams.

    Blue: the tree is faster, red: it is slower; the line is where neither is. A dot: too close to call.

    Args:
        phases: of `kdlab.study.phase.phase_table`, its works places on a line.
        rows: the column that tells the rows of panels apart: "context" or "comparison".
        marks: without a g they stand over the panel, as their g is not known.
        xlabel: what the places are.
        title: of the figure.
        provenance: adds the line that says on what it was measured.
        notes: put before the provenance.
    """
    if phases.duplicated(["work", "g", "streams", rows]).any():
        raise ArgumentError("phases", f"one row a work, g, streams and {rows}", f"{len(phases)} rows")
    streams, kinds = list(phases["streams"].unique()), list(phases[rows].unique())
    size = (theme.REPORT_INCHES, 1.5 + 1.55 * len(kinds))
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    axes = figure.subplots(len(kinds), len(streams), squeeze=False, sharex=True, sharey=True)
    entries: dict[str, Any] = {}
    for (row, column), ax in np.ndenumerate(axes):
        panel = phases[(phases[rows] == kinds[row]) & (phases["streams"] == streams[column])]
        if panel.empty:
            ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", va="center", fontsize=theme.TICK_PT)
        else:
            _draw_region(ax, panel)
            entries |= _draw_marks(ax, marks, sorted(panel["g"].unique()))
        words = streams_text(streams[column]) if row == 0 else ""
        name = f"context {kinds[row]:,}" if rows == "context" else str(kinds[row]).replace(", ", ",\n")
        theme.style_axes(ax, title=words, xlabel="", ylabel=f"{name}\nrouting g" if column == 0 else "", grid="none")
        ax.yaxis.label.set_fontsize(theme.TICK_PT)
    axes[-1][len(streams) // 2].set_xlabel(xlabel, fontsize=theme.LABEL_PT)
    _add_colours(figure, axes)
    theme.add_figure_heading(figure, title, entries, num_columns=3)
    theme.add_figure_caption(figure, provenance, notes)
    return figure


def plot_budget_phase(
    table: pd.DataFrame, *, title: str = "Times as fast as AR, by budget and streams",
    provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Figure:  # fmt: skip
    """Draw factors over AR by streams (to the right) and budget (upwards), a panel a context; the best one is framed.

    The best of chains and of what adapts stand below the budgets.

    Args:
        table: of `kdlab.study.phase.budget_table`.
        title: of the figure.
        provenance: adds the line that says on what it was measured.
        notes: put before the provenance.
    """
    contexts, arms = list(table["context"].unique()), list(table["arm"].unique())
    order = [arm for arm in arms if not arm.isdigit()] + [arm for arm in arms if arm.isdigit()]
    figure = Figure(figsize=(theme.REPORT_INCHES, 4.9), facecolor="white", layout="constrained")
    axes = figure.subplots(1, len(contexts), squeeze=False, sharey=True)
    for ax, context in zip(axes[0], contexts, strict=True):
        panel = table[table["context"] == context]
        factors, best = (panel.pivot(index="arm", columns="streams", values=name).loc[order]
                         for name in ("over_ar", "best"))  # fmt: skip
        ax.imshow(np.log(factors.to_numpy()), cmap=_COLOURS, norm=_FACTORS, aspect="auto", origin="lower")
        for (row, column), factor in np.ndenumerate(factors.to_numpy()):
            colour = "white" if abs(np.log(factor)) > 0.7 * _LOG_SPAN else theme.BLACK
            frame = {"boxstyle": "square,pad=0.12", "facecolor": "none", "edgecolor": colour}
            words = "" if np.isnan(factor) else f"{factor:.2f}"
            ax.text(column, row, words, ha="center", va="center", fontsize=theme.TICK_PT - 1.5, color=colour,
                    bbox=frame if best.iat[row, column] else None)  # fmt: skip
        ax.axhline(len(order) - sum(map(str.isdigit, order)) - 0.5, color=theme.BLACK, linewidth=1.2)
        ax.set_xticks(range(len(factors.columns)), [str(count) for count in factors.columns])
        ax.set_yticks(range(len(order)), order)
        theme.style_axes(
            ax, title=f"context {context:,}", xlabel="streams", ylabel="" if ax is not axes[0][0] else "tree's budget",
            grid="none",
        )  # fmt: skip
    theme.add_figure_heading(figure, title, {}, num_columns=1)
    theme.add_figure_caption(figure, provenance, [*beyond_notes(table["over_ar"]), *notes])
    return figure


def _draw_region(ax: Axes, panel: pd.DataFrame) -> None:
    gains = panel.pivot(index="g", columns="work", values="gain")
    places, g = gains.columns.to_numpy(dtype=float), gains.index.to_numpy(dtype=float)
    ax.pcolormesh(places, g, gains.to_numpy(), cmap=_COLOURS, norm=_NORM, shading="nearest", rasterized=True)
    if (gains.to_numpy() > 0).any() and (gains.to_numpy() < 0).any():
        ax.contour(places, g, gains.to_numpy(), levels=[0.0], colors=[theme.BLACK], linewidths=1.2)
    unsure = panel[panel["call"] == OPEN]
    ax.plot(unsure["work"].astype(float), unsure["g"], linestyle="none", marker=".", markersize=2.2, color=theme.GREY)


def _draw_marks(ax: Axes, marks: Sequence[Mark], g: Sequence[float]) -> dict[str, Any]:
    entries: dict[str, Any] = {
        "too close to call": Line2D([], [], linestyle="none", marker=".", color=theme.GREY),
        "neither is faster": Line2D([], [], color=theme.BLACK, linewidth=1.2),
    }
    styles: dict[str, dict[str, Any]] = {}
    known = [colour for colour in theme.SERIES if colour not in (theme.BLUE, theme.VERMILLION)]
    for mark in marks:
        place = len(styles) % len(known)
        shape = {"marker": "v", "markersize": 5} if mark.g is None else {"marker": "*", "markersize": 9}
        style = styles.setdefault(mark.label, shape | {"color": known[place], "markeredgecolor": theme.BLACK})
        above = 0.75 * (g[-1] - g[-2]) if len(g) > 1 else 0.0  # over the uppermost field, not on it
        height = g[-1] + above if mark.g is None else mark.g
        entries[mark.label] = ax.plot(
            [mark.place], [height], linestyle="none", markeredgewidth=0.5, clip_on=False, zorder=5, **style
        )[0]
    return entries


def _add_colours(figure: Figure, axes: Any) -> None:
    bar = figure.colorbar(ScalarMappable(_NORM, _COLOURS), ax=axes, shrink=0.85, aspect=30, pad=0.01, extend="both")
    bar.set_label("tree over control", fontsize=theme.TICK_PT)
    ticks = np.linspace(-_SPAN, _SPAN, 7)
    bar.set_ticks(ticks.tolist(), labels=[f"{100 * tick:+.0f} %".replace("-", "−") for tick in ticks])
    bar.ax.tick_params(labelsize=theme.TICK_PT - 0.5)
