"""Where acceptance comes from: depth, rank and length of rounds, and how far the draft's probabilities hold."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator, PercentFormatter

from kdlab.errors import ArgumentError
from kdlab.viz import theme
from kdlab.viz.arms import arm_label, arm_style

_HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++")
_MOST_SERIES = len(_HATCHES)


def plot_acceptance_by_depth(
    table: pd.DataFrame, ax: Axes | None = None, *, title: str = "Acceptance by depth",
    provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw `kdlab.study.acceptance_by_depth`: acceptance given all smaller depths, and of all rounds.

    Args:
        table: one row a depth: depth, conditional, cumulative, num_rounds.
        ax: where to draw; a new figure when None.
        title: what the rounds are (budget, prompts).
        provenance: adds the line that says on what the numbers were made.
    """
    ax = theme.new_axes(ax)
    depth = table["depth"].to_numpy()
    ax.bar(depth, table["cumulative"], width=0.62, color=theme.mix((0.34, 0.71, 0.91), 0.55), edgecolor=theme.BLUE,
           linewidth=0.8, label="of all rounds: accepted to this depth or deeper")  # fmt: skip
    ax.plot(depth, table["conditional"], marker="o", color=theme.VERMILLION, linewidth=1.6,
            label="of rounds accepted up to the depth before: accepted here")  # fmt: skip
    _share_axis(ax)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    rounds = int(table["num_rounds"].iloc[0]) if len(table) else 0
    theme.style_axes(ax, title=title, xlabel="depth in the tree (1 = first drafted token)",
                     ylabel=f"share of {rounds:,} rounds", grid="y")  # fmt: skip
    _legend_above(ax, ncols=1)
    theme.add_caption(ax, provenance)
    return ax


def plot_rank_heatmap(
    table: pd.DataFrame, ax: Axes | None = None, *, column: str = "conditional", max_rank: int = 8,
    title: str = "Which candidate is the target's token?", provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw `kdlab.study.acceptance_by_rank` as a map: depth to the right, rank downward, share in each cell.

    Args:
        table: one row a (depth, rank).
        ax: where to draw; a new figure when None.
        column: "conditional" (given that all smaller depths were drafted) or "probability" (over all positions).
        max_rank: ranks shown.
        title: of the figure.
        provenance: adds the line that says on what the numbers were made.
    """
    shown = table[table["rank"] < max_rank]
    grid = shown.pivot(index="rank", columns="depth", values=column)
    ax = theme.new_axes(ax, (max(5.0, 0.72 * len(grid.columns) + 1.6), 0.42 * len(grid) + 1.5))
    values = grid.to_numpy(dtype=float)
    # Vertical gaps of probability are best seen on a root scale: rank 0 holds most of it.
    ax.imshow(np.sqrt(np.nan_to_num(values)), cmap=matplotlib.colormaps["Blues"], vmin=0.0, vmax=1.0, aspect="auto")
    for (line, place), value in np.ndenumerate(values):
        text = "–" if np.isnan(value) else f"{100.0 * value:.0f}" if value >= 0.0995 else f"{100.0 * value:.1f}"
        ax.text(place, line, text, ha="center", va="center", fontsize=theme.TICK_PT,
                color="white" if value > 0.4 else theme.BLACK)  # fmt: skip
    ax.set_xticks(range(len(grid.columns)), [str(depth) for depth in grid.columns])
    ax.set_yticks(range(len(grid)), [str(rank) for rank in grid.index])
    given = "tokens before it drafted" if column == "conditional" else "all positions"
    theme.style_axes(ax, title=title, xlabel=f"depth in the tree; cells in % of positions ({given})",
                     ylabel="rank in the draft (0 = best)", grid="none")  # fmt: skip
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    theme.add_caption(ax, provenance)
    return ax


def plot_length_histogram(
    histogram: pd.DataFrame, ax: Axes | None = None, *, title: str = "How long are rounds?",
    provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw `kdlab.study.length_histogram`: the share of rounds of each length, one bar a method beside the others.

    Args:
        histogram: one row a (method, setting, length); at most seven arms.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what the numbers were made.
    """
    arms = list(histogram.groupby(["method", "setting"], sort=False))
    if len(arms) > _MOST_SERIES:
        raise ArgumentError("histogram", f"at most {_MOST_SERIES} arms", len(arms))
    ax = theme.new_axes(ax, (8.0, 4.0))
    width, colours = 0.84 / max(len(arms), 1), _arm_colours([method for (method, _), _ in arms])
    for number, ((method, setting), group) in enumerate(arms):
        offset = (number - (len(arms) - 1) / 2.0) * width
        ax.bar(group["length"] + offset, group["share"], width=width, label=arm_label(method, setting),
               color=colours[number], edgecolor="white", linewidth=0.4, hatch=_HATCHES[number])  # fmt: skip
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    theme.style_axes(ax, title=title, xlabel="tokens of a round (accepted draft tokens + the bonus)",
                     ylabel="share of rounds", grid="y")  # fmt: skip
    _legend_above(ax, ncols=min(len(arms), 4))
    theme.add_caption(ax, provenance)
    return ax


def plot_calibration(
    table: pd.DataFrame, ax: Axes | None = None, *, depths: Sequence[int] | None = None,
    title: str = "Do the draft's probabilities mean what they say?", provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw `kdlab.study.calibration`: predicted probability against how often the target chose the token.

    Args:
        table: one row a (depth, bin); empty bins are left out, the size of a mark grows with its number of entries, and
            bars are 95 % Wilson intervals of its share, entries taken as independent.
        ax: where to draw; a new figure when None.
        depths: depths to show; None takes up to seven, spread over all.
        title: of the figure.
        provenance: adds the line that says on what the numbers were made.
    """
    every = sorted(table["depth"].unique())
    spread = np.unique(np.linspace(0, len(every) - 1, min(len(every), _MOST_SERIES)).round().astype(int))
    shown = [every[index] for index in spread] if depths is None else list(depths)
    ax = theme.new_axes(ax, (6.6, 6.8))
    ax.plot([0, 1], [0, 1], color=theme.GREY, linewidth=1.0, linestyle="--", label="calibrated")
    shades = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.88, len(shown)))
    for number, depth in enumerate(shown):
        group = table[(table["depth"] == depth) & (table["num_entries"] > 0)]
        _draw_reliability(ax, group, shades[number], theme.MARKERS[number % len(theme.MARKERS)], f"depth {depth}")
    ax.set_xlim(-0.02, 1.02)
    ax.set_ylim(-0.02, 1.02)
    ax.set_aspect("equal")
    theme.style_axes(ax, title=title, xlabel="draft probability of a candidate (mean of its bin)",
                     ylabel="share that was the target's token")  # fmt: skip
    _legend_above(ax, heading="bars: 95 % intervals; the smaller a mark, the fewer candidates in its bin")
    theme.add_caption(ax, provenance)
    return ax


def plot_missed_mass(
    table: pd.DataFrame, ax: Axes | None = None, *, title: str = "What the top K leaves out",
    provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw `kdlab.study.missed_mass`: draft probability outside the recorded candidates, and tokens outside them.

    Args:
        table: one row a depth: mean, p90, maximum, next_outside.
        ax: where to draw; a new figure when None.
        title: of the figure; it should name K.
        provenance: adds the line that says on what the numbers were made.
    """
    ax = theme.new_axes(ax)
    series = (
        ("maximum", "largest missed probability", theme.GREY, ":"),
        ("p90", "90 % of positions miss less", theme.SKY, "--"),
        ("mean", "mean missed probability", theme.BLUE, "-"),
        ("next_outside", "positions whose next token is missed", theme.VERMILLION, "-"),
    )
    for number, (column, label, colour, style) in enumerate(series):
        ax.plot(table["depth"], table[column], color=colour, linestyle=style, marker=theme.MARKERS[number], label=label)
    _share_axis(ax)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    theme.style_axes(ax, title=title, xlabel="depth in the tree", ylabel="share outside the top K", grid="y")
    _legend_above(ax)
    theme.add_caption(ax, provenance)
    return ax


def _draw_reliability(ax: Axes, group: pd.DataFrame, colour: Any, marker: str, name: str) -> None:
    """One depth: marks with Wilson intervals, joined by a thin line."""
    columns = ("mean_predicted", "observed", "num_entries")
    x, share, entries = (group[column].to_numpy(dtype=float) for column in columns)
    error = float(group["calibration_error"].iloc[0]) if len(group) else float("nan")
    low, high = wilson(share, entries)
    ax.plot(x, share, color=colour, linewidth=0.8, alpha=0.6)
    ax.vlines(x, low, high, color=[colour], linewidth=1.4, alpha=0.8)
    sizes = 6.0 + 90.0 * np.sqrt(entries / max(entries.max(initial=1.0), 1.0))
    ax.scatter(x, share, s=sizes, color=[colour], marker=marker, edgecolor="white", linewidth=0.5, zorder=4,
               label=f"{name}, error {error:.3f}")  # fmt: skip


def wilson(share: np.ndarray, num_entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % score interval of a binomial share (Wilson 1927)."""
    z2 = 1.96**2 / num_entries
    middle = (share + z2 / 2.0) / (1.0 + z2)
    half = np.sqrt(z2 * (share * (1.0 - share) + z2 / 4.0)) / (1.0 + z2)
    return middle - half, middle + half


def _share_axis(ax: Axes) -> None:
    ax.set_ylim(0.0, 1.04)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _legend_above(ax: Axes, ncols: int = 2, heading: str | None = None) -> None:
    """Put the legend between title and data, where it hides neither."""
    num_lines = -(-len(ax.get_legend_handles_labels()[1]) // ncols) + (heading is not None)
    theme.add_legend(ax, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=ncols, frameon=False, borderaxespad=0.1,
                     title=heading, title_fontsize=theme.TICK_PT, alignment="left")  # fmt: skip
    ax.set_title(ax.get_title(loc="left"), loc="left", fontsize=theme.TITLE_PT, pad=8.0 + 14.0 * num_lines,
                 color=theme.BLACK, parse_math=False)  # fmt: skip


def _arm_colours(methods: Sequence[str]) -> list[tuple[float, float, float]]:
    """Each method's own colour, paler for its earlier arms."""
    seen: Counter[str] = Counter()
    total, colours = Counter(methods), []
    for method in methods:
        seen[method] += 1
        colours.append(theme.mix(to_rgb(arm_style(method).colour), 0.35 + 0.65 * seen[method] / total[method]))
    return colours
