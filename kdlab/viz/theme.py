"""Colours, axes and captions that every kdlab figure shares; nothing here touches matplotlib's global settings."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from io import BytesIO
from textwrap import fill
from typing import Any

from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Annotation

from kdlab.errors import ArgumentError

# The Okabe-Ito colours, told apart with every common colour blindness; markers and lines differ too, for grey print.
BLACK = "#1a1a1a"
GREY = "#6b6b6b"
PALE = "#d0d0d0"
BLUE = "#0072b2"
SKY = "#56b4e9"
GREEN = "#009e73"
ORANGE = "#e69f00"
VERMILLION = "#d55e00"
PURPLE = "#cc79a7"
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

TREE, CHAIN, AR = BLUE, VERMILLION, BLACK
"""One colour a method in every figure; the adaptive chain is a CHAIN too, with another marker."""

PROSE, MONO = "DejaVu Sans", "DejaVu Sans Mono"
"""The two fonts that matplotlib brings along, so that a figure looks the same on every machine."""

TITLE_PT, LABEL_PT, TICK_PT, CAPTION_PT = 11.0, 9.5, 8.5, 8.0
REPORT_INCHES = 8.2
"""Width at which a figure of 110 dots an inch fills a report of 900 pixels, where TICK_PT reads as 9.7 points."""

_SEPARATOR = " · "


def new_axes(ax: Axes | None, size: tuple[float, float] = (7.0, 4.2)) -> Axes:
    """Return `ax`, or the only axes of a new figure of `size` inches that belongs to no global figure list."""
    if ax is not None:
        return ax
    return Figure(figsize=size, facecolor="white", layout="constrained").add_subplot()


def figure_of(drawing: Axes | Figure) -> Figure:
    """Return the whole figure that axes stand on.

    Raises:
        ArgumentError: the axes were removed from their figure.
    """
    figure = drawing if isinstance(drawing, Figure) else drawing.get_figure(root=True)
    if figure is None:
        raise ArgumentError("drawing", "axes of a figure", "axes of none")
    return figure


def png_bytes(drawing: Axes | Figure, dpi: float) -> bytes:
    """Return the whole figure of `drawing` as a PNG at `dpi` dots per inch."""
    buffer = BytesIO()
    figure_of(drawing).savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def style_axes(ax: Axes, *, title: str, xlabel: str, ylabel: str, grid: str = "both") -> Axes:
    """Give `ax` its title and labels and the house look; `grid` is "both", "x", "y" or "none"."""
    ax.set_title(drawable(title), fontsize=TITLE_PT, loc="left", color=BLACK, parse_math=False)
    ax.set_xlabel(drawable(xlabel), fontsize=LABEL_PT, color=BLACK, parse_math=False)
    ax.set_ylabel(drawable(ylabel), fontsize=LABEL_PT, color=BLACK, parse_math=False)
    ax.tick_params(labelsize=TICK_PT, colors=BLACK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    if grid != "none":
        ax.grid(True, axis=grid, color=PALE, linewidth=0.6, alpha=0.7)  # type: ignore[arg-type]
    return ax


def add_legend(ax: Axes, **options: Any) -> None:
    """Draw the legend of `ax` in the house look, if it has labelled artists."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        settings: dict[str, Any] = {"fontsize": TICK_PT, "framealpha": 0.92, "edgecolor": PALE} | options
        legend = ax.legend(handles, [drawable(label) for label in labels], **settings)
        for text in legend.get_texts():
            text.set_parse_math(False)


def caption(provenance: Mapping[str, Any] | None, notes: Iterable[str] = ()) -> str:
    """Say in one line on what a figure's numbers were made: pair, device, torch, commit; unknown facts are left out.

    Args:
        provenance: as `kdlab.provenance.run_provenance` makes it, or None.
        notes: further sentences, put first.
    """
    return _SEPARATOR.join(_caption_parts(provenance, notes))


def add_caption(
    ax: Axes, provenance: Mapping[str, Any] | None, notes: Iterable[str] = (), *, below: Artist | None = None
) -> Annotation | None:
    """Write `caption(...)` small below the x label of `ax`, or below another artist; None when nothing is known."""
    parts = _caption_parts(provenance, notes)
    if not parts:
        return None
    # No wider than the axes, or the layout would shrink them to make room for it.
    num_chars = max(40, num_chars_of(ax.get_window_extent().width / figure_of(ax).dpi, CAPTION_PT))
    anchor = (ax.transAxes, ax.xaxis.label if below is None else below)
    return ax.annotate(
        _broken(parts, num_chars), (0, 0), xycoords=anchor, xytext=(0, -5), textcoords="offset points",
        ha="left", va="top", fontsize=CAPTION_PT, color=GREY, parse_math=False, annotation_clip=False,
    )  # fmt: skip


def add_figure_caption(figure: Figure, provenance: Mapping[str, Any] | None, notes: Iterable[str] = ()) -> None:
    """Write `caption(...)` small along the bottom of a figure of several axes."""
    parts = _caption_parts(provenance, notes)
    if parts:
        text = _broken(parts, num_chars_of(figure.get_figwidth(), CAPTION_PT))
        figure.supxlabel(text, x=0.01, ha="left", fontsize=CAPTION_PT, color=GREY, parse_math=False)


def add_figure_heading(
    figure: Figure, heading: str, entries: Mapping[str, Artist], *, num_columns: int, weight: str = "normal"
) -> None:
    """Write a heading and, below it, one legend of label to mark, above all axes of a figure.

    The heading is the title of the legend: the layout keeps room for a legend or a figure's title, not for both.
    """
    is_laid_out = isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine)
    place: Any = "outside upper left" if is_laid_out else "upper left"
    points = TITLE_PT if weight == "normal" else LABEL_PT
    legend = figure.legend(
        list(entries.values()), [drawable(label) for label in entries], loc=place, ncols=num_columns,
        title=wrapped(heading, figure.get_figwidth(), points, bold=weight == "bold"), frameon=False, alignment="left",
        fontsize=TICK_PT, columnspacing=1.6, handletextpad=0.6, title_fontproperties={"size": points, "weight": weight},
    )  # fmt: skip
    for text in (legend.get_title(), *legend.get_texts()):
        text.set_parse_math(False)


def wrapped(text: str, inches: float, points: float = TITLE_PT, *, bold: bool = False) -> str:
    """Break the lines of a title that are longer than a figure is wide."""
    num_chars = num_chars_of(0.96 * inches, points, bold=bold)
    return "\n".join(fill(drawable(line), num_chars) for line in text.split("\n"))


def num_chars_of(inches: float, points: float, *, bold: bool = False) -> int:
    """Return how many characters of prose of a size fit a width."""
    return int(72.0 * inches / ((0.64 if bold else 0.56) * points))


def drawable(text: str) -> str:
    """Replace characters that matplotlib's own font lacks by escapes, so that a figure holds no empty boxes."""
    return "".join(char if char == "\n" or ord(char) in _glyphs() else _escape(char) for char in text)


def mix(colour: tuple[float, float, float], weight: float) -> tuple[float, float, float]:
    """Blend `colour` (RGB, 0..1) with white: weight 1 is the colour itself, 0 is white."""
    red, green, blue = (1.0 - weight * (1.0 - channel) for channel in colour)
    return red, green, blue


def _caption_parts(provenance: Mapping[str, Any] | None, notes: Iterable[str]) -> list[str]:
    facts = dict(provenance or {})
    commit = facts.get("git_commit")
    parts = [
        *notes,
        str(facts.get("pair") or ""),
        _device(facts),
        str(facts.get("dtype") or "").removeprefix("torch."),
        f"torch {facts['torch']}" if facts.get("torch") else "",
        f"commit {str(commit)[:9]}{' with changes' if facts.get('git_dirty') else ''}" if commit else "",
    ]
    return [drawable(part) for part in parts if part]


def _broken(parts: list[str], num_chars: int) -> str:
    """Join the parts of a caption, with line breaks between parts only, and no last line of a single short part."""
    lines: list[list[str]] = [[]]
    for part in parts:
        if lines[-1] and len(_SEPARATOR.join([*lines[-1], part])) > num_chars:
            lines.append([])
        lines[-1].append(part)
    if len(lines) > 1 and len(lines[-1]) == 1 and len(lines[-2]) > 1:
        moved = [lines[-2][-1], *lines[-1]]
        if len(_SEPARATOR.join(moved)) <= num_chars:
            lines[-2:] = [lines[-2][:-1], moved]
    return "\n".join(fill(_SEPARATOR.join(line), num_chars) for line in lines)


def _cpu_name(name: str) -> str:
    """Shorten what a processor calls itself: `Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz` is an Intel Xeon Gold 6230."""
    bare = re.sub(r"\((?:R|TM|r|tm)\)|@.*|\b(?:CPU|Processor|\d+-Core)\b", " ", name)
    return " ".join(bare.split())


def _device(facts: Mapping[str, Any]) -> str:
    device = str(facts.get("gpu") or facts.get("device") or "")
    details = [_cpu_name(str(facts.get("cpu") or ""))] if device == "cpu" else []
    if details and facts.get("threads"):
        details.append(f"{facts['threads']} thread{'s' if facts['threads'] != 1 else ''}")
    details = [detail for detail in details if detail]
    return f"{device} ({', '.join(details)})" if details else device


def _escape(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


@lru_cache(maxsize=1)
def _glyphs() -> frozenset[int]:
    paths = [font_manager.findfont(font_manager.FontProperties(family=family)) for family in (PROSE, MONO)]
    prose, mono = (frozenset(font_manager.get_font(path).get_charmap()) for path in paths)
    return prose & mono
