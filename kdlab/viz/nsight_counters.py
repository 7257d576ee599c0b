"""What the hardware counted of a round: bytes against their least, the roofline, how busy the matrix units are."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from kdlab.errors import ArgumentError
from kdlab.profiling import PHASES
from kdlab.viz import theme
from kdlab.viz.nsight import PHASE_COLOURS

_PHASE_MARKERS = {
    "prefill": "P", "draft": "o", "build": "v", "verify": "s", "accept": "^", "commit": "D", "other": "X",
}  # fmt: skip
_MOST_KERNELS, _NAME_CHARS = 16, 28
_ABOVE: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "frameon": False, "borderpad": 0.1}
"""Place of a legend beside the title, where no mark can be under it."""


def plot_stage_bytes(
    traffic: pd.DataFrame, ax: Axes | None = None, *, title: str, provenance: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw the bytes that each stage moved to and from the memory beside the fewest that it must move.

    Args:
        traffic: lines of one case of `kdlab.profiling.stage_traffic`.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what it was counted.
        notes: put before the provenance.

    Raises:
        ArgumentError: no lines.
    """
    _check(traffic, "traffic", "lines of stage_traffic")
    traffic = traffic.sort_values("phase", key=lambda phases: phases.map(PHASES.index), kind="stable")
    ax = theme.new_axes(ax, (theme.REPORT_INCHES, 1.5 + 0.27 * len(traffic)))
    for place, row in enumerate(traffic.to_dict("records")):
        colour, words = PHASE_COLOURS[row["phase"]], "not counted"
        if np.isfinite(row["bytes"]):
            ax.barh([place], [row["bytes"]], height=0.62, color=colour, zorder=2)
            over = f", {row['bytes'] / row['floor_bytes']:.2f} ×" if row["floor_bytes"] > 0 else ""
            words = f"{_bytes(row['bytes'])}{over}"
        if row["floor_bytes"] > 0:
            ax.plot([row["floor_bytes"]] * 2, [place - 0.42, place + 0.42], color=theme.BLACK, linewidth=2.0, zorder=4)
        right = np.nanmax([row["bytes"], row["floor_bytes"], 1.0])
        ax.annotate(words, (right, place), xytext=(5, 0), textcoords="offset points", va="center",
                    fontsize=theme.TICK_PT, color=theme.GREY)  # fmt: skip
    values = traffic[["bytes", "floor_bytes"]].to_numpy(dtype=float)
    values = values[np.isfinite(values) & (values > 0)]
    ax.set_xscale("log")
    ax.set_xlim(values.min() / 3.0 if len(values) else 1.0, 12.0 * values.max() if len(values) else 10.0)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
    ax.set_yticks(range(len(traffic)), [theme.drawable(stage) for stage in traffic["stage"]])
    ax.set_ylim(len(traffic) - 0.4, -0.6)
    theme.style_axes(ax, title=title, xlabel="bytes to and from memory in one round, log scale", ylabel="", grid="x")
    handles = [Line2D([], [], color=theme.BLACK, linewidth=2.0, label="least: every byte once")]
    ax.legend(handles=handles, fontsize=theme.TICK_PT, **_ABOVE)
    theme.add_caption(ax, provenance, notes)
    return ax


def plot_roofline(
    traffic: pd.DataFrame, ax: Axes | None = None, *, bytes_per_s: float, flops_per_s: float, title: str,
    provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw operations a second against operations a byte, a mark a stage, below the two ceilings of the card.

    Hollow marks took their operations from the stage's least, full ones were counted. A stage without any on the matrix
    units has no place here; the caption names them.

    Args:
        traffic: lines of one case of `kdlab.profiling.stage_traffic`.
        ax: where to draw; a new figure when None.
        bytes_per_s, flops_per_s: the card's measured ceilings.
        title: of the figure.
        provenance: adds the line that says on what it was counted.
        notes: put before the provenance.

    Raises:
        ArgumentError: no stage with bytes and operations.
    """
    _check(traffic, "traffic", "lines of stage_traffic")
    has_place = (traffic["flops"] > 0) & (traffic["bytes"] > 0) & (traffic["us"] > 0)
    points, others = traffic[has_place], ", ".join(traffic.loc[~has_place, "stage"])
    _check(points, "traffic", "a stage with bytes and operations")
    ax = theme.new_axes(ax, (theme.REPORT_INCHES, 5.2))
    intensity = (points["flops"] / points["bytes"]).to_numpy(dtype=float)
    rate = (points["flops"] / points["us"] / 1e6).to_numpy(dtype=float)
    _draw_roof(ax, intensity, rate, bytes_per_s, flops_per_s)
    for place, row in enumerate(points.to_dict("records")):
        colour, marker = PHASE_COLOURS[row["phase"]], _PHASE_MARKERS[row["phase"]]
        face = colour if row["flops_counted"] else "white"
        ax.plot([intensity[place]], [rate[place]], linestyle="none", marker=marker, markersize=7.5,
                markerfacecolor=face, markeredgecolor=colour, markeredgewidth=1.4, zorder=4)  # fmt: skip
    _label_points(ax, intensity, rate, list(points["stage"]))
    xlabel = "operations a byte to or from memory, log scale"
    theme.style_axes(ax, title=title, xlabel=xlabel, ylabel="TFLOP/s, log scale")
    _phase_legend(ax, points)
    theme.add_caption(ax, provenance, [*([f"no place here: {others}"] if others else []), *notes])
    return ax


def plot_tensor_use(
    kernels: pd.DataFrame, ax: Axes | None = None, *, title: str, provenance: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw how busy each kernel keeps the matrix units and the memory, those with the most time on top.

    Args:
        kernels: lines of one case of `kdlab.profiling.kernel_use`; after the sixteenth the caption says how many.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what it was counted.
        notes: put before the provenance.

    Raises:
        ArgumentError: no kernels.
    """
    _check(kernels, "kernels", "lines of kernel_use")
    shown = kernels.head(_MOST_KERNELS)
    rest = len(kernels) - len(shown)
    ax = theme.new_axes(ax, (theme.REPORT_INCHES, 1.5 + 0.34 * len(shown)))
    columns = {"tensor_pct": ("matrix units", theme.BLUE, -0.19), "dram_pct": ("memory", theme.ORANGE, 0.19)}
    for name, (label, colour, shift) in columns.items():
        values = shown[name].to_numpy(dtype=float)
        ax.barh(np.arange(len(shown)) + shift, np.nan_to_num(values), height=0.34, color=colour, label=label, zorder=2)
        for place, value in enumerate(values):
            words = "not counted" if np.isnan(value) else f"{value:.0f} %"
            ax.annotate(words, (np.nan_to_num(value), place + shift), xytext=(3, 0), textcoords="offset points",
                        va="center", fontsize=theme.CAPTION_PT - 1.0, color=theme.GREY)  # fmt: skip
    names = [f"{_short(row.kernel)}\n{row.us:,.1f} µs in {_launches(row.launches)}" for row in shown.itertuples()]
    ax.set_yticks(range(len(shown)), [theme.drawable(name) for name in names])
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set_xlim(0.0, 112.0)
    theme.style_axes(ax, title=title, xlabel="busy, % of the most that the card sustains", ylabel="", grid="x")
    theme.add_legend(ax, ncols=2, **_ABOVE)
    more = [f"{rest} more kernels with {kernels['share'][_MOST_KERNELS:].sum():.1%} of the time"] if rest else []
    theme.add_caption(ax, provenance, [*more, *notes])
    return ax


def _check(table: pd.DataFrame, name: str, expected: str) -> None:
    if table.empty:
        raise ArgumentError(name, expected, "none")
    if table["case"].nunique() > 1:
        raise ArgumentError(name, f"{expected} of one case", ", ".join(table["case"].unique()))


def _short(name: str) -> str:
    """A kernel's name where it leaves the figure its width: cuBLAS's have forty characters."""
    return name if len(name) <= _NAME_CHARS else name[: _NAME_CHARS - 1] + "…"


def _launches(number: int) -> str:
    return f"{number} launch{'es' if number != 1 else ''}"


def _bytes(count: float) -> str:
    unit = min(int(np.log10(max(count, 1.0)) // 3), 4)
    return f"{count / 1000.0**unit:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


def _draw_roof(ax: Axes, intensity: np.ndarray, rate: np.ndarray, bytes_per_s: float, flops_per_s: float) -> None:
    """Draw the two ceilings, and set axes that hold them and the marks."""
    ridge, top, low = flops_per_s / bytes_per_s, flops_per_s / 1e12, rate.min() / 3.0
    left, right = min(intensity.min(), ridge) / 3.0, 4.0 * max(intensity.max(), ridge)
    ax.plot([left, ridge, right], [left * bytes_per_s / 1e12, top, top], color=theme.BLACK, linewidth=1.8, zorder=2)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(left, right)
    ax.set_ylim(low, 2.5 * max(top, rate.max()))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    middle = np.sqrt(max(left, 1e12 * low / bytes_per_s) * ridge)
    read = (f"read {bytes_per_s / 1e12:.2f} TB/s", middle, middle * bytes_per_s / 1e12)
    for words, x, y in (read, (f"matrix units {top:,.0f} TFLOP/s", right, top)):
        ax.annotate(words, (x, y), xytext=(-6, 5), textcoords="offset points", ha="right", fontsize=theme.TICK_PT)


def _label_points(ax: Axes, x: np.ndarray, y: np.ndarray, names: list[str]) -> None:
    """Write a name beside each mark, lower or higher where another name or mark has the place to its right."""
    places = ax.transData.transform(np.stack([x, y], axis=1)) * 72.0 / theme.figure_of(ax).dpi
    taken = [(float(left) - 5.0, float(height), 10.0) for left, height in places]
    for place in np.argsort(-y):
        left, height = map(float, places[place])
        width = 5.2 * len(names[place])
        # Down before up, where the roof is; what does not stand right beside its mark has a line to it.
        shifts = [(8.0, 0.0)] + [(30.0, step) for step in (0.0, -9.5, -19.0, -28.5, 9.5, 19.0, -38.0, 28.5)]
        free = (shift for shift in shifts if not _hits(taken, left + shift[0], height + shift[1], width))
        shift = next(free, shifts[0])
        taken.append((left + shift[0], height + shift[1], width))
        leader = {"arrowstyle": "-", "color": theme.GREY, "linewidth": 0.7} if shift != shifts[0] else None
        ax.annotate(theme.drawable(names[place]), (x[place], y[place]), xytext=shift, textcoords="offset points",
                    va="center", fontsize=theme.TICK_PT, color=theme.BLACK, zorder=5, arrowprops=leader)  # fmt: skip


def _hits(taken: list[tuple[float, float, float]], left: float, height: float, width: float) -> bool:
    """Whether a word lies over another one or a mark; each is (left, middle height, width) in points."""
    return any(
        abs(height - other_height) < 9.0 and left < other + size and other < left + width
        for other, other_height, size in taken
    )


def _phase_legend(ax: Axes, points: pd.DataFrame) -> None:
    handles = [
        Line2D([], [], linestyle="none", marker=_PHASE_MARKERS[phase], color=PHASE_COLOURS[phase], label=phase)
        for phase in dict.fromkeys(points["phase"])
    ]
    if not points["flops_counted"].all():
        look: dict[str, Any] = {"linestyle": "none", "marker": "s", "markerfacecolor": "white", "color": theme.GREY}
        handles.append(Line2D([], [], label="fewest operations, not counted", **look))
    ax.legend(handles=handles, fontsize=theme.TICK_PT, ncols=len(handles), **_ABOVE)
