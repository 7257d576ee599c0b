"""Draft trees drawn: what the drafter proposed, what the target accepted, and what it wanted instead."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import BoxStyle

from kdlab.decode.records import RoundRecord
from kdlab.errors import ArgumentError
from kdlab.model.tokenizer import Tokenizer
from kdlab.viz import theme
from kdlab.viz.round_drawing import RoundDrawing, arrange, outcome, round_title

ACCEPTED, BONUS, FILL = theme.VERMILLION, theme.GREEN, theme.SKY
LABEL_LIMIT = 80
"""Trees of more nodes than this are drawn as dots without their tokens."""
_SMALLEST_PT = 4.5
_LABEL_PT, _LINE_INCHES, _TALLEST_INCHES = 9.5, 0.26, 12.6
_ROUNDED = BoxStyle.Round(pad=0.0, rounding_size=0.3)(-0.5, -0.5, 1.0, 1.0, 1.0)
"""The outline of a node as a marker, for dots and for the legend."""


def plot_draft_tree(
    record: RoundRecord, tokenizer: Tokenizer, ax: Axes | None = None, *,
    budget: int | None = None, title: str | None = None, legend: bool = True,
    provenance: Mapping[str, Any] | None = None,
) -> Axes:  # fmt: skip
    """Draw one round: nodes by depth from left to right, likeliest first, the accepted path and the bonus marked.

    A node's fill is the draft's probability of its whole path (white 0, full colour 1). Trees of more than
    `LABEL_LIMIT` nodes, or too many for the room on `ax`, show dots in place of token text.

    Args:
        record: the round.
        tokenizer: gives the token texts, in printable form.
        ax: where to draw; a figure that fits the tree is made when None.
        budget: nodes that a tree of this budget leaves out are grey, and the walk ends where it would have ended;
            None draws the tree as it was verified.
        title: in place of the sentence that counts nodes and accepted tokens.
        legend: explain the marks below the drawing.
        provenance: adds the line that says on what the round was decoded.
    """
    drawing = _arrange(record, tokenizer, budget)
    ax = theme.new_axes(ax, _figure_size(drawing))
    _draw(ax, drawing, drawing.num_columns, drawing.num_lines)
    heading = title if title is not None else round_title(record, budget)
    ax.set_title(theme.drawable(heading), loc="left", fontsize=theme.TITLE_PT, color=theme.BLACK, parse_math=False)
    key = None
    if legend:
        handles = legend_handles(dropped=drawing.num_kept < drawing.bonus)
        key = ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.0, 0.0), ncols=2, frameon=False,
                        fontsize=theme.TICK_PT, borderaxespad=0.0, columnspacing=1.4, handletextpad=0.5)  # fmt: skip
    theme.add_caption(ax, provenance, below=key)
    return ax


def plot_rounds(
    rounds: Sequence[RoundRecord], tokenizer: Tokenizer, *,
    num_columns: int | None = None, width: float = 10.0, provenance: Mapping[str, Any] | None = None,
) -> Figure:  # fmt: skip
    """Draw several rounds as small multiples at one scale on a new figure, with one legend.

    Args:
        rounds: the rounds, in reading order.
        tokenizer: gives the token texts.
        num_columns: drawings side by side; None takes up to three, as many as leave the tokens readable.
        width: of the figure, inches.
        provenance: adds the line that says on what the rounds were decoded.
    """
    if not rounds:
        raise ArgumentError("rounds", "at least one round", "none")
    drawings = [_arrange(record, tokenizer) for record in rounds]
    widest = max(drawing.num_columns for drawing in drawings)
    if num_columns is None:
        num_columns = _panels_side_by_side(drawings, width / widest)
    starts = range(0, len(rounds), num_columns)
    deepest = [max(drawing.num_lines for drawing in drawings[start : start + num_columns]) for start in starts]
    height = _LINE_INCHES * sum(deepest) + 0.44 * len(starts) + 0.9
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.set_facecolor("white")
    panels = figure.subplots(len(starts), num_columns, squeeze=False, height_ratios=[lines + 0.6 for lines in deepest])
    for ax in panels.flat[len(rounds) :]:
        ax.set_axis_off()
    for number, (record, drawing, ax) in enumerate(zip(rounds, drawings, panels.flat, strict=False)):
        _draw(ax, drawing, widest, deepest[number // num_columns])
        ax.set_title(f"Round {record.round}: {outcome(record)}", loc="left", fontsize=theme.LABEL_PT,
                     color=theme.BLACK)  # fmt: skip
    figure.legend(handles=legend_handles(), loc="outside upper left", ncols=2, frameon=False, fontsize=theme.LABEL_PT)
    theme.add_figure_caption(figure, provenance)
    return figure


def legend_handles(*, dropped: bool = False) -> list[Line2D]:
    """Handles that explain the marks of `plot_draft_tree`, those of a smaller budget too if it has `dropped` nodes."""
    common: dict[str, Any] = {"linestyle": "none", "markersize": 9}
    handles = [
        Line2D([], [], marker="s", color=theme.BLACK, label="root: last committed token", **common),
        Line2D([], [], marker=_ROUNDED, markerfacecolor=theme.mix(to_rgb(FILL), 0.6), markeredgecolor=theme.GREY,
               label="drafted; darker = likelier path", **common),
        Line2D([], [], marker=_ROUNDED, markerfacecolor="white", markeredgecolor=ACCEPTED, markeredgewidth=2.0,
               label="accepted by the target", **common),
        Line2D([], [], marker="s", markerfacecolor="white", markeredgecolor=BONUS, markeredgewidth=2.0,
               label="bonus: what the target wanted next", **common),
    ]  # fmt: skip
    grey = Line2D([], [], marker=_ROUNDED, markerfacecolor="white", markeredgecolor=theme.PALE,
                  label="left out by the smaller budget", **common)  # fmt: skip
    return [*handles, grey] if dropped else handles


def _arrange(record: RoundRecord, tokenizer: Tokenizer, budget: int | None = None) -> RoundDrawing:
    drawing = arrange(record, tokenizer, budget)
    return replace(drawing, labels=[theme.drawable(label) for label in drawing.labels])


def _figure_size(drawing: RoundDrawing) -> tuple[float, float]:
    longest = min(max(map(len, drawing.labels)), 10)
    line = 0.27 if drawing.num_lines <= 24 else min(0.2, _TALLEST_INCHES / drawing.num_lines)
    return max(drawing.num_columns * (0.42 + 0.09 * longest), 6.4), max(line * drawing.num_lines + 1.35, 2.0)


def _panels_side_by_side(drawings: Sequence[RoundDrawing], column_inches: float) -> int:
    """How many drawings, up to three, leave six characters (or the longest label) in a column."""
    longest = min(max(len(label) for drawing in drawings for label in drawing.labels), 6)
    return max(1, min(3, int(72.0 * column_inches / (_LABEL_PT * (0.62 * longest + 2.1)))))


def _draw(ax: Axes, drawing: RoundDrawing, num_columns: int, num_lines: int) -> None:
    """Draw on a grid of `num_columns` by `num_lines`, which other drawings may share."""
    ax.set_xlim(-0.6, num_columns - 0.4)
    ax.set_ylim(-num_lines + 0.4, 0.6)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    _draw_edges(ax, drawing)
    font_size, num_chars = _label_room(ax, num_columns, num_lines)
    too_narrow = num_chars < 3 and max(map(len, drawing.labels)) > num_chars
    if font_size < _SMALLEST_PT or drawing.bonus > LABEL_LIMIT or too_narrow:
        _draw_dots(ax, drawing)
    else:
        _draw_labels(ax, drawing, font_size, num_chars)


def _label_room(ax: Axes, num_columns: int, num_lines: int) -> tuple[float, int]:
    """Font size in points that keeps lines apart, and how many characters fit a column at that size."""
    room = ax.get_window_extent().transformed(ax.figure.dpi_scale_trans.inverted())
    font_size = min(_LABEL_PT, 72.0 * room.height / num_lines / 1.9)
    column_pt = 72.0 * room.width / num_columns
    return font_size, max(1, int((column_pt - 2.2 * font_size) / (0.62 * max(font_size, 1.0))))


def _draw_edges(ax: Axes, drawing: RoundDrawing) -> None:
    accepted = set(zip(drawing.path, drawing.path[1:], strict=False))
    for row, parent in enumerate(drawing.parents):
        if parent < 0 or (row == drawing.bonus and drawing.is_dropped(row)):
            continue
        x0, x1 = drawing.columns[parent], drawing.columns[row]
        y0, y1 = -drawing.lines[parent], -drawing.lines[row]
        colour, width, layer = theme.GREY, 0.8, 1
        style: str | tuple[float, tuple[float, float]] = "-"
        if (parent, row) in accepted:
            colour, width, layer = ACCEPTED, 2.2, 3
        elif row == drawing.wanted:
            colour, width, style, layer = BONUS, 1.6, (0, (2, 1.5)), 2
        elif drawing.is_dropped(row):
            colour = theme.PALE
        bend = x0 + 0.5
        ax.plot([x0, bend, bend, x1], [y0, y0, y1, y1], color=colour, linewidth=width, linestyle=style, zorder=layer,
                solid_joinstyle="round")  # fmt: skip


def _node_style(drawing: RoundDrawing, row: int) -> tuple[Any, Any, float]:
    """Fill, outline and outline width of a node."""
    if row == drawing.wanted:
        return "white", BONUS, 1.6
    if drawing.is_dropped(row):
        return "white", theme.PALE, 0.6
    if row == 0:
        return theme.BLACK, theme.BLACK, 1.0
    fill = theme.mix(to_rgb(FILL), 0.05 + 0.85 * sqrt(drawing.probabilities[row]))
    return (fill, ACCEPTED, 1.8) if row in drawing.path else (fill, theme.GREY, 0.6)


def _draw_labels(ax: Axes, drawing: RoundDrawing, font_size: float, num_chars: int) -> None:
    for row, label in enumerate(drawing.labels):
        if row == drawing.bonus and drawing.is_dropped(row):
            continue
        fill, outline, width = _node_style(drawing, row)
        square = row in (0, drawing.wanted)
        text = label if len(label) <= num_chars else label[: max(num_chars - 1, 1)] + "…"
        ax.text(
            drawing.columns[row], -drawing.lines[row], text, ha="center", va="center", fontsize=font_size, zorder=5,
            color=_text_colour(drawing, row), family=theme.MONO, parse_math=False, clip_on=True,
            weight="bold" if row == drawing.wanted or row in drawing.path else "normal",
            bbox={"boxstyle": f"{'square' if square else 'round'},pad=0.28", "facecolor": fill, "edgecolor": outline,
                  "linewidth": width},
        )  # fmt: skip


def _text_colour(drawing: RoundDrawing, row: int) -> str:
    if row == 0:
        return "white"
    return theme.GREY if drawing.is_dropped(row) and row != drawing.wanted else theme.BLACK


def _draw_dots(ax: Axes, drawing: RoundDrawing) -> None:
    special = {0, drawing.wanted, *drawing.path}
    for row in range(len(drawing.parents)):
        if row == drawing.bonus and drawing.is_dropped(row):
            continue
        fill, outline, width = _node_style(drawing, row)
        size = 7.0 if row in special else 2.0 + 4.0 * sqrt(drawing.probabilities[row])
        ax.plot(drawing.columns[row], -drawing.lines[row], marker="s" if row in (0, drawing.wanted) else _ROUNDED,
                markersize=size, markerfacecolor=fill, markeredgecolor=outline, markeredgewidth=width,
                zorder=5 if row in special else 4)  # fmt: skip
