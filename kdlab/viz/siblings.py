"""After an accepted sibling: the draft's best token off its own best path, what it predicts and what is observed."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from kdlab.study.siblings import PREFIXES
from kdlab.viz import theme
from kdlab.viz.acceptance import wilson

_LABELS = dict(zip(PREFIXES, ("along the top path", "right after a sibling", "later after a sibling"), strict=True))
_STYLES = dict(zip(PREFIXES, zip((theme.BLUE, theme.VERMILLION, theme.PURPLE), "os^", strict=True), strict=True))


def plot_after_sibling(
    table: pd.DataFrame, ax: Axes | None = None, *, title: str = "Does the draft hold off its own best path?",
    provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw `kdlab.study.acceptance_after_sibling`: the draft's best token, predicted and observed, by its prefix.

    Args:
        table: one row a (depth, prefix); bars are 95 % Wilson intervals, positions taken as independent.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what the numbers were made.
    """
    ax = theme.new_axes(ax, (8.0, 4.4))
    for place, prefix in enumerate(PREFIXES):
        group = table[(table["prefix"] == prefix) & (table["num_positions"] > 0)]
        x = group["depth"].to_numpy() + 0.22 * (place - 1)
        columns = ("observed", "predicted", "num_positions")
        observed, predicted, number = (group[column].to_numpy(dtype=float) for column in columns)
        low, high = wilson(observed, number)
        colour, marker = _STYLES[prefix]
        name = f"{_LABELS[prefix]}, {int(number.sum()):,} positions"
        ax.vlines(x, low, high, color=colour, linewidth=1.4)
        ax.scatter(x, observed, color=colour, marker=marker, s=38, zorder=4, label=name)
        ax.scatter(x, predicted, facecolor="white", edgecolor=colour, marker=marker, s=70, linewidth=1.3, zorder=3)
    hollow = Line2D([], [], linestyle="none", marker="o", markerfacecolor="white", markeredgecolor=theme.GREY)
    handles, labels = ax.get_legend_handles_labels()
    ax.set_ylim(0.0, 1.04)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    theme.style_axes(ax, title=title, xlabel="depth in the tree; the tokens before it were accepted",
                     ylabel="the draft's best token is right", grid="y")  # fmt: skip
    ax.legend([*handles, hollow], [*labels, "hollow: what the draft predicts"], loc="lower left", ncols=2,
              bbox_to_anchor=(-0.02, 1.0), frameon=False, fontsize=theme.TICK_PT)  # fmt: skip
    ax.set_title(ax.get_title(loc="left"), loc="left", fontsize=theme.TITLE_PT, pad=40.0, color=theme.BLACK,
                 parse_math=False)  # fmt: skip
    theme.add_caption(ax, provenance)
    return ax


def sibling_findings(table: pd.DataFrame) -> str:
    """Say in Markdown, a line a prefix, how often the draft's best token is right and how often it thinks it is."""
    lines = []
    for prefix in PREFIXES:
        group = table[table["prefix"] == prefix]
        number = int(group["num_positions"].sum())
        if not number:
            lines.append(f"- {_LABELS[prefix].capitalize()}: no position.")
            continue
        observed = group["hits"].sum() / number
        predicted = np.nansum(group["predicted"] * group["num_positions"]) / number
        low, high = (bound.item() for bound in wilson(np.array([observed]), np.array([float(number)])))
        holds = "within" if low <= predicted <= high else "outside"
        lines.append(
            f"- {_LABELS[prefix].capitalize()} ({number:,} positions) the draft's best token is right in "
            f"**{observed:.1%}**, and the draft says {predicted:.1%}: {100 * (observed - predicted):+.1f} points, "
            f"{holds} the 95 % interval of {low:.1%} to {high:.1%}."
        )
    return "\n".join(lines)
