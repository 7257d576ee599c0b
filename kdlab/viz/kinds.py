"""Trees and chains by kind of text: one panel a kind, and what the panels say in sentences."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kdlab.errors import ArgumentError
from kdlab.study.bootstrap import MIN_PROMPTS
from kdlab.viz import theme
from kdlab.viz.arms import mark_flags
from kdlab.viz.sweep import ROWS_LABEL, TOKENS_LABEL, rows_axis
from kdlab.viz.wording import percent, prompts_text

NAMED_BUDGETS = (7, 15, 31, 64)


def plot_by_kind(
    summary: pd.DataFrame, axes: Sequence[Axes] | None = None, *, title: str = "Acceptance by kind of text",
    loops: Collection[str] = (), provenance: Mapping[str, Any] | None = None,
) -> Figure:  # fmt: skip
    """Draw tokens per round of DDTree and chains, one panel a kind of text, with the trees of the others in grey.

    Args:
        summary: from `kdlab.study.summarize` by method, setting and kind.
        axes: one axes a kind, of one figure; a new figure when None.
        title: of the figure.
        loops: kinds whose texts repeat themselves in a loop; their panels say so.
        provenance: adds the line that says on what the numbers were made.

    Raises:
        ArgumentError: no kind, one of `loops` that is none, or fewer axes than kinds.
    """
    kinds = _kinds(summary, loops)
    axes = _new_panels(len(kinds)) if axes is None else list(axes)
    if len(axes) < len(kinds):
        raise ArgumentError("axes", f"{len(kinds)}, one a kind", len(axes))
    for number, (kind, ax) in enumerate(zip(kinds, axes, strict=False)):
        for other in kinds:
            rows = _rows(summary, other, "ddtree")
            ax.plot(rows["rows_per_round"], rows["tokens_per_round"], color=theme.PALE, linewidth=1.0, zorder=1)
        _draw_kind(ax, summary, kind, theme.SERIES[number % len(theme.SERIES)])
        rows_axis(ax, summary["rows_per_round"])
        ax.set_ylim(0.0, 1.08 * float(summary["tokens_per_round"].max()))
        loop = ": repeats itself" if kind in loops else ""
        prompts = prompts_text(int(summary.loc[summary["kind"] == kind, "num_prompts"].iloc[0]))
        theme.style_axes(ax, title=f"{kind} ({prompts}){loop}", xlabel="", ylabel="")
        mark_flags(ax, summary[summary["kind"] == kind])
    return _finish(theme.figure_of(axes[0]), axes, title, provenance)


def kind_findings(summary: pd.DataFrame, budgets: Sequence[int] | None = None, *, loops: Collection[str] = ()) -> str:
    """Say for each kind where the tree first beats the best chain, and by how much at some budgets, as Markdown.

    Args:
        summary: from `kdlab.study.summarize` by method, setting and kind.
        budgets: tree budgets to name; None takes those of `NAMED_BUDGETS` that the summary has for every kind.
        loops: kinds whose texts repeat themselves in a loop: marked, and left out of the mean over kinds.

    Raises:
        ArgumentError: no kind, one of `loops` that is none, a kind without chains or trees, or a missing budget.
    """
    kinds = _kinds(summary, loops)
    gains = {kind: _gains(summary, kind) for kind in kinds}
    if budgets is None:
        budgets = [budget for budget in NAMED_BUDGETS if all(budget in gain.index for gain in gains.values())]
    for kind, gain in gains.items():
        for budget in budgets:
            if budget not in gain.index:
                raise ArgumentError("budgets", f"budgets that the summary has for {kind}", budget)
    lines = [_kind_line(summary, kind, gains[kind], budgets, kind in loops) for kind in kinds]
    counted = [gains[kind] for kind in kinds if kind not in loops]
    if len(counted) > 1 and budgets:
        left_out = f" without {', '.join(kind for kind in kinds if kind in loops)}" if loops else ""
        mean = _listed({budget: float(np.mean([gain[budget] for gain in counted])) for budget in budgets})
        lines.append(f"- Mean over the {len(counted)} kinds{left_out}: {mean}.")
    return "\n".join(lines)


def _kind_line(summary: pd.DataFrame, kind: str, gain: pd.Series, budgets: Sequence[int], loops: bool) -> str:
    chain = _best_chain(summary, kind)
    prompts = int(chain["num_prompts"])
    few = " (too few for an interval)" if prompts < MIN_PROMPTS else ""
    mark = "; its text repeats itself in a loop, so it is no measure of other text" if loops else ""
    ahead = gain[gain > 0.0]
    if ahead.empty:
        first = f"no tree of up to budget {gain.index.max():g} beats it"
    else:
        budget = int(ahead.index[0])
        first = f"a tree first beats it at budget {budget} ({budget + 1} rows)"
    named = f": {_listed({budget: float(gain[budget]) for budget in budgets})}" if budgets else ""
    return (
        f"- **{kind}**, {prompts_text(prompts)}{few}{mark}: the best chain (length {chain['setting']:g}) brings "
        f"{chain['tokens_per_round']:.2f} tokens per round; {first}{named}."
    )


def _listed(gains: Mapping[int, float]) -> str:
    return ", ".join(f"{percent(gain)} at budget {budget}" for budget, gain in gains.items())


def _kinds(summary: pd.DataFrame, loops: Collection[str]) -> list[str]:
    kinds = list(summary["kind"].unique()) if "kind" in summary else []
    if not kinds:
        raise ArgumentError("summary", "rows with a column kind (summarize by method, setting and kind)", "none")
    unknown = [kind for kind in loops if kind not in kinds]
    if isinstance(loops, str) or unknown:
        raise ArgumentError("loops", "some of " + ", ".join(map(str, kinds)), loops)
    return kinds


def _rows(summary: pd.DataFrame, kind: str, method: str) -> pd.DataFrame:
    return summary[(summary["kind"] == kind) & (summary["method"] == method)].sort_values("rows_per_round")


def _best_chain(summary: pd.DataFrame, kind: str) -> pd.Series:
    chains = _rows(summary, kind, "chain")
    if chains.empty:
        raise ArgumentError("summary", f"rows of chains for {kind}", "none")
    return chains.loc[chains["tokens_per_round"].idxmax()]


def _gains(summary: pd.DataFrame, kind: str) -> pd.Series:
    """Tokens per round of each budget over those of the best chain, minus 1; by budget."""
    trees = _rows(summary, kind, "ddtree")
    if trees.empty:
        raise ArgumentError("summary", f"rows of trees for {kind}", "none")
    best = float(_best_chain(summary, kind)["tokens_per_round"])
    return trees.set_index("setting")["tokens_per_round"].sort_index() / best - 1.0


def _draw_kind(ax: Axes, summary: pd.DataFrame, kind: str, colour: str) -> None:
    trees, chains = _rows(summary, kind, "ddtree"), _rows(summary, kind, "chain")
    ax.plot(trees["rows_per_round"], trees["tokens_per_round"], color=colour, linewidth=2.0, zorder=4)
    known = trees[trees["tokens_per_round_low"].notna()]
    ax.fill_between(known["rows_per_round"], known["tokens_per_round_low"], known["tokens_per_round_high"],
                    color=colour, alpha=0.16, linewidth=0, zorder=2)  # fmt: skip
    ax.plot(chains["rows_per_round"], chains["tokens_per_round"], color=colour, linewidth=1.0, linestyle="--",
            marker="s", markersize=4.0, zorder=5)  # fmt: skip
    if chains.empty:
        return
    best = _best_chain(summary, kind)
    ax.axhline(best["tokens_per_round"], color=colour, linestyle=":", linewidth=1.4, zorder=3)
    # Below its own line, on the right, where no curve that gains from more rows comes near.
    ax.annotate(f"best chain: length {best['setting']:g}, {best['tokens_per_round']:.2f}",
                (1.0, best["tokens_per_round"]), xycoords=("axes fraction", "data"), xytext=(-3, -3),
                textcoords="offset points", ha="right", va="top", fontsize=theme.TICK_PT, color=colour)  # fmt: skip


def _new_panels(num_kinds: int) -> list[Axes]:
    num_columns = min(num_kinds, 2)
    num_lines = -(-num_kinds // num_columns)
    figure = Figure(figsize=(theme.REPORT_INCHES, 1.1 + 2.4 * num_lines), facecolor="white", layout="constrained")
    panels = list(figure.subplots(num_lines, num_columns, squeeze=False, sharex=True, sharey=True).flat)
    for ax in panels[num_kinds:]:
        ax.set_axis_off()
    return panels


def _finish(figure: Figure, axes: Sequence[Axes], title: str, provenance: Mapping[str, Any] | None) -> Figure:
    """Labels that all panels share: title, legend, axes and caption."""
    for ax in axes:
        grid = ax.get_subplotspec()
        if grid is None or grid.is_first_col():
            ax.set_ylabel("tokens per round")
        if grid is None or grid.is_last_row():
            ax.set_xlabel(ROWS_LABEL)
    marks = [
        Line2D([], [], color=theme.GREY, linewidth=2.0, label="DDTree"),
        Line2D([], [], color=theme.GREY, linestyle="--", marker="s", markersize=4.0, label="chain, length rows − 1"),
        Line2D([], [], color=theme.GREY, linestyle=":", linewidth=1.4, label="best chain"),
        Line2D([], [], color=theme.PALE, label="DDTree, other kinds"),
    ]
    entries = {str(mark.get_label()): mark for mark in marks}
    theme.add_figure_heading(figure, title, entries, num_columns=4)
    theme.add_figure_caption(figure, provenance, [TOKENS_LABEL])
    return figure
