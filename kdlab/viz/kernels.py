"""The kernel benchmark: time against bound, goal and peers, how it grows with a size, errors, and bytes read."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kdlab.errors import ArgumentError
from kdlab.viz import theme

_COLOURS = {
    "cuda": theme.BLUE, "wgmma": theme.BLUE, "mma": theme.GREEN, "mma fixed split": theme.SKY, "flashmla": theme.PURPLE,
    "naive": theme.ORANGE, "flashmla prefix": theme.VERMILLION,
}  # fmt: skip
_MARKERS = {"wgmma": "o", "cuda": "*", "mma": "s", "mma fixed split": "s", "flashmla": "D", "naive": "^"}
_PEERS = {
    "torch": "P", "torch sdpa": "X", "torch argmax": "v", "torch multinomial": "<", "torch index": "d",
    "cublas": "p", "cublas bf16": "h", "host heap": ">", "host walk": "8", "flashmla prefix": "D",
}  # fmt: skip
_EAGER = " (eager)"
# Wider than a point and over it: a time that just meets its goal stands where the goal stands.
_GOAL: dict[str, Any] = {
    "color": theme.GREY, "linestyle": "none", "marker": "_", "markersize": 14, "markeredgewidth": 2, "zorder": 5
}  # fmt: skip
_GOAL_TICK: dict[str, Any] = {"color": theme.GREY, "linewidth": 1.4, "linestyle": (0, (1.5, 1.0)), "zorder": 5}
TIME_LABEL = "µs a call (median)"
BF16_ROUNDING = 2.0**-9
"""Half a step of bfloat16 at 1: what storing the output alone costs."""

MOST_LABELS = 5


def plot_kernel_dots(
    table: pd.DataFrame, ax: Axes | None = None, *, title: str, provenance: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw one line a case: the time of every arm, the bound as a bar that nothing can be left of, the goal as a tick.

    Args:
        table: lines of `kdlab.bench.kernels.kernel_table`, one a case and arm.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what the times were measured.
        notes: put before the provenance.
    """
    cases = _cases(table)
    ax = theme.new_axes(ax, (theme.REPORT_INCHES, 1.5 + 0.26 * len(cases)))
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    drawn: dict[str, None] = {}
    for place, (_, arms) in enumerate(cases):
        low, goal = arms["floor_us"].iloc[0], arms["goal_us"].dropna()
        if pd.notna(low):
            ax.plot([low, low], [place - 0.36, place + 0.36], color=theme.BLACK, linewidth=2.0, zorder=3)
        if len(goal):
            ax.plot([goal.iloc[0]] * 2, [place - 0.36, place + 0.36], **_GOAL_TICK)
        for row in arms.to_dict("records"):
            name, style = _label(row), arm_style(row)
            ax.plot([row["us"]], [place], linestyle="none", label=None if name in drawn else name, zorder=4, **style)
            drawn[name] = None
    ax.set_yticks(range(len(cases)), [theme.drawable(name) for name, _ in cases])
    ax.set_ylim(len(cases) - 0.4, -0.6)
    _bound_entries(ax, goals=bool(table["goal_us"].notna().any()))
    theme.style_axes(ax, title=title, xlabel=f"{TIME_LABEL}, log scale", ylabel="", grid="x")
    theme.add_legend(ax, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    theme.add_caption(ax, provenance, notes)
    return ax


def plot_kernel_growth(
    panels: Mapping[str, pd.DataFrame], axes: Sequence[Axes] | None = None, *, x: Mapping[str, str], title: str,
    provenance: Mapping[str, Any] | None = None, notes: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """Draw how time grows with one size, a panel a table: a line an arm, the bound dotted, goals as bars.

    A panel without lines says that they were not timed.

    Args:
        panels: title of the panel to lines of `kernel_table` that differ in one size and in the arm.
        axes: one a panel, of one figure; a new figure when None.
        x: title of the panel to the column of that size.
        title: of the figure.
        provenance: adds the line that says on what the times were measured.
        notes: put before the provenance.

    Raises:
        ArgumentError: no panel, or one with several lines an arm and size.
    """
    if not panels:
        raise ArgumentError("panels", "at least one", "none")
    axes = _new_panels(len(panels)) if axes is None else list(axes)
    entries: dict[str, Any] = {}
    for ax, (name, table) in zip(axes, panels.items(), strict=True):
        entries |= _draw_growth(ax, table, x[name], name)
    figure = theme.figure_of(axes[0])
    axes[0].set_ylabel(TIME_LABEL)
    entries["bound of this card"] = Line2D([], [], color=theme.BLACK, linestyle=":", linewidth=1.6)
    if any(table["goal_us"].notna().any() for table in panels.values()):
        entries["goal"] = Line2D([], [], **_GOAL)
    theme.add_figure_heading(figure, title, entries, num_columns=4)
    theme.add_figure_caption(figure, provenance, notes)
    return figure


def plot_kernel_errors(
    errors: pd.DataFrame, ax: Axes | None = None, *, title: str = "Error against float64",
    provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw the error of every arm's worst row; exact results (integers, moved rows) stand at the left edge.

    Args:
        errors: columns op, impl, own and error.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what it was measured.
        notes: put before the provenance.

    Raises:
        ArgumentError: no errors.
    """
    if errors.empty:
        raise ArgumentError("errors", "rows of metric relative_error", "none")
    lines = errors.groupby(["op", "impl", "own"], sort=False)["error"].max().reset_index()
    ax = theme.new_axes(ax, (theme.REPORT_INCHES, 1.4 + 0.26 * len(lines)))
    left = 1e-9
    for place, row in enumerate(lines.to_dict("records")):
        exact, style = row["error"] == 0.0, arm_style(row)
        ax.plot([left if exact else max(row["error"], left)], [place], linestyle="none", zorder=4, **style)
        words = "exact" if exact else f"{row['error']:.1e}"
        ax.annotate(words, (left if exact else row["error"], place), xytext=(7, 0), textcoords="offset points",
                    va="center", fontsize=theme.TICK_PT, color=theme.GREY)  # fmt: skip
    ax.axvline(BF16_ROUNDING, color=theme.GREY, linestyle=":", linewidth=1.4)
    ax.annotate("rounding to bfloat16", (BF16_ROUNDING, 1.0), xycoords=("data", "axes fraction"), xytext=(-3, -3),
                textcoords="offset points", ha="right", va="top", fontsize=theme.TICK_PT, color=theme.GREY)  # fmt: skip
    ax.set_xscale("log")
    ax.set_xlim(left / 3.0, 1.0)
    ax.set_yticks(range(len(lines)), [theme.drawable(f"{op}: {impl}") for op, impl in lines[["op", "impl"]].to_numpy()])
    ax.set_ylim(len(lines) - 0.4, -0.6)
    theme.style_axes(ax, title=title, xlabel="‖out − exact‖ / ‖exact‖ of the worst row", ylabel="", grid="x")
    theme.add_caption(ax, provenance, notes)
    return ax


def plot_bytes_read(
    counted: pd.DataFrame, least_bytes: float, ax: Axes | None = None, *, title: str,
    provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw the bytes that each implementation asked of the L1 cache, the L2 cache and the memory.

    Args:
        counted: one row an implementation (column impl) with bytes in l1_read, l2_read and dram_read.
        least_bytes: what one call must read at least.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what it was counted.
        notes: put before the provenance.
    """
    levels = {"l1_read": "L1, by loads of threads", "l2_read": "L2", "dram_read": "memory"}
    ax = theme.new_axes(ax, (theme.REPORT_INCHES, 3.6))
    height = 0.8 / len(levels)
    for number, (column, name) in enumerate(levels.items()):
        places = np.arange(len(counted)) + height * (number - 1)
        values = counted[column].to_numpy(dtype=float)
        ax.barh(places, values, 0.9 * height, color=theme.SERIES[number], label=name)
        for place, value in zip(places, values, strict=True):
            words = "not counted" if np.isnan(value) else f"{value / least_bytes:,.1f} ×"
            x = max(np.nan_to_num(value), least_bytes / 10.0)
            ax.annotate(words, (x, place), xytext=(3, 0), va="center", textcoords="offset points",
                        fontsize=theme.TICK_PT)  # fmt: skip
    ax.axvline(least_bytes, color=theme.BLACK, linestyle=":", linewidth=1.6, label="every byte once")
    ax.set_xscale("log")
    ax.set_xlim(least_bytes / 10.0, 30.0 * float(np.nanmax(counted[list(levels)].to_numpy(dtype=float))))
    ax.set_yticks(range(len(counted)), list(counted["impl"]))
    ax.invert_yaxis()
    theme.style_axes(ax, title=title, xlabel="bytes read in one call, log scale", ylabel="", grid="x")
    theme.add_legend(ax, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    theme.add_caption(ax, provenance, notes)
    return ax


def _draw_growth(ax: Axes, table: pd.DataFrame, x: str, name: str) -> dict[str, Any]:
    if table.empty:
        ax.text(0.5, 0.5, "not timed in this run", transform=ax.transAxes, ha="center", fontsize=theme.LABEL_PT)
        theme.style_axes(ax, title=name, xlabel=x, ylabel="", grid="none")
        return {}
    if table.duplicated(["impl", "mode", x]).any():
        raise ArgumentError("panels", f"one line an arm and {x}", f"several for {name!r}")
    entries = {}
    for _, rows in table.groupby(["impl", "mode"], sort=False):
        rows, style = rows.sort_values(x), arm_style(rows.iloc[0])
        line = "-" if rows["own"].iloc[0] else "--"
        (entries[_label(rows.iloc[0])],) = ax.plot(
            rows[x], rows["us"], linestyle=line, linewidth=1.5, zorder=4, **style
        )
        ax.fill_between(rows[x], rows["p10"], rows["p90"], color=style["color"], alpha=0.16, linewidth=0, zorder=2)
    bounds = table.drop_duplicates(x).sort_values(x)
    ax.plot(bounds[x], bounds["floor_us"], color=theme.BLACK, linestyle=":", linewidth=1.6, zorder=3)
    goals = table[table["goal_us"].notna()]
    ax.plot(goals[x], goals["goal_us"], **_GOAL)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    places = sorted(set(table[x]))
    # Seven labels of a narrow panel run into one another: every second one, the last among them.
    ax.xaxis.set_major_locator(FixedLocator(places[::-2] if len(places) > MOST_LABELS else places))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    theme.style_axes(ax, title=name, xlabel=x, ylabel="")
    return entries


def _new_panels(num_panels: int) -> list[Axes]:
    figure = Figure(figsize=(theme.REPORT_INCHES, 4.0), facecolor="white", layout="constrained")
    return list(figure.subplots(1, num_panels, squeeze=False).flat)


def _cases(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    if table.empty:
        raise ArgumentError("table", "lines of kernel_table", "none")
    several = table["op"].nunique() > 1
    groups = table.groupby(["op", "case"], sort=False)
    return [(f"{op}  {case}" if several else case, arms) for (op, case), arms in groups]


def _bound_entries(ax: Axes, *, goals: bool) -> None:
    ax.plot([], [], color=theme.BLACK, linewidth=2.0, label="bound of this card")
    if goals:
        ax.plot([], [], label="goal", **_GOAL_TICK)


def _label(row: Mapping[str, Any] | pd.Series) -> str:
    return f"{row['impl']}{_EAGER if row['mode'] == 'eager' else ''}"


def arm_style(row: Mapping[str, Any] | pd.Series) -> dict[str, Any]:
    """Return line options: kdlab's own arms in colour; peers in grey with other marks; eager calls hollow."""
    name = str(row["impl"])
    marker = _MARKERS.get(name, "o") if row["own"] else _PEERS.get(name, "H")
    size = 10.0 if marker == "*" else 6.0  # a star fills less of its box
    colour = _COLOURS.get(name, theme.GREY)
    inside, edge = ("white", colour) if row.get("mode") == "eager" else (colour, "white")
    return {
        "color": colour, "marker": marker, "markersize": size, "markerfacecolor": inside, "markeredgecolor": edge
    }  # fmt: skip
