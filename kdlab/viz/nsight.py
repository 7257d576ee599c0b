"""Where a round's time goes: stages side by side, launches along time, how busy the GPU is."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kdlab.errors import ArgumentError
from kdlab.profiling import PHASES
from kdlab.profiling.round_tables import IDLE, UNMARKED, middle_times
from kdlab.viz import theme

PHASE_COLOURS = {
    "prefill": theme.ORANGE, "draft": theme.BLUE, "build": theme.SKY, "verify": theme.VERMILLION,
    "accept": theme.GREEN, "commit": theme.PURPLE, "other": theme.GREY, IDLE: theme.BLACK,
}  # fmt: skip
_LEAST_GAP_US = 0.05
_BAR = 0.36
_LABEL_INCHES = 2.1
_MODES = {"graph": "one CUDA graph", "eager": "launched one by one"}


def plot_stage_shares(
    shares: pd.DataFrame, axes: Sequence[Axes] | None = None, *, title: str,
    provenance: Mapping[str, Any] | None = None, notes: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """Draw the share of the round that every phase and stage takes, a panel a case: hollow what is not in a graph.

    Args:
        shares: of `kdlab.profiling.stage_shares`.
        axes: one a case, of one figure; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what it was timed.
        notes: put before the provenance.

    Raises:
        ArgumentError: no shares.
    """
    if shares.empty:
        raise ArgumentError("shares", "lines of stage_shares", "none")
    cases, lines = list(dict.fromkeys(shares["case"])), _lines(shares)
    if axes is None:
        size = (theme.REPORT_INCHES, 1.7 + 0.23 * len(lines))
        figure = Figure(figsize=size, facecolor="white", layout="constrained")
        axes = list(figure.subplots(1, len(cases), sharey=True, squeeze=False).flat)
    modes = [mode for mode in _MODES if (shares["mode"] == mode).any()]
    for ax, case in zip(axes, cases, strict=True):
        _draw_shares(ax, shares[shares["case"] == case], lines, modes)
        theme.style_axes(ax, title=theme.wrapped(case, 0.7 * theme.REPORT_INCHES / len(cases)),
                         xlabel="share of the round", ylabel="", grid="x")  # fmt: skip
    axes[0].set_yticks(range(len(lines)), [theme.drawable(stage or phase) for phase, stage in lines])
    for label, (_, stage) in zip(axes[0].get_yticklabels(), lines, strict=True):
        label.set_fontweight("normal" if stage else "bold")
    axes[0].set_ylim(len(lines) - 0.4, -0.7)
    entries = {f"{_MODES[mode]}{_length(shares, mode, cases)}": Patch(
        facecolor=theme.GREY if mode == modes[0] else "white", edgecolor=theme.GREY) for mode in modes}  # fmt: skip
    theme.add_figure_heading(theme.figure_of(axes[0]), title, entries, num_columns=2)
    theme.add_figure_caption(theme.figure_of(axes[0]), provenance, notes)
    return theme.figure_of(axes[0])


def plot_timeline(
    launches: pd.DataFrame, ax: Axes | None = None, *, title: str, until_us: float | None = None,
    provenance: Mapping[str, Any] | None = None, notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw every launch of one round as a bar from its start to its end, a line a stage; on top the time without any.

    Args:
        launches: of `kdlab.profiling.middle_round`.
        ax: where to draw; a new figure when None.
        title: of the figure.
        until_us: the round is drawn to here; None takes all of it.
        provenance: adds the line that says on what it was timed.
        notes: put before the provenance.

    Raises:
        ArgumentError: no launches.
    """
    if launches.empty:
        raise ArgumentError("launches", "those of a round", "none")
    rows = launches.assign(stage=launches["stage"].replace("", UNMARKED))
    rows["end"] = rows["start_us"] + rows["duration_us"]
    stages = list(dict.fromkeys(zip(rows["phase"], rows["stage"], strict=True)))
    stages.sort(key=lambda key: PHASES.index(key[0]))
    ax = theme.new_axes(ax, (theme.REPORT_INCHES, 1.7 + 0.22 * len(stages)))
    places = {key: place for place, key in enumerate([(IDLE, IDLE), *stages])}
    gaps = _gaps(rows)
    # Without an edge: thousands of gaps narrower than a pixel would look like one that lasts.
    _draw_bars(ax, gaps, places[IDLE, IDLE], theme.BLACK, edge=0.0)
    for (phase, stage), place in list(places.items())[1:]:
        own = rows[(rows["phase"] == phase) & (rows["stage"] == stage)]
        _draw_bars(ax, own[["start_us", "end"]].to_numpy(dtype=float), place, PHASE_COLOURS[phase])
    end = float(rows["end"].max()) if until_us is None else until_us
    ax.set_xlim(0.0, end)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set_yticks(range(len(places)), [theme.drawable(stage) for _, stage in places])
    ax.set_ylim(len(places) - 0.4, -0.6)
    theme.style_axes(ax, title=title, xlabel="µs since the round's first launch", ylabel="", grid="x")
    phases = list(dict.fromkeys(phase for phase, _ in stages))
    handles = [Patch(facecolor=PHASE_COLOURS[phase], label=phase) for phase in phases]
    place_of_legend: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    ax.legend(handles=handles, fontsize=theme.TICK_PT, edgecolor=theme.PALE, **place_of_legend)
    idle = float((gaps[:, 1] - gaps[:, 0]).sum())
    words = f"{len(rows)} launches, {len(gaps)} gaps of {idle:,.0f} µs together"
    theme.add_caption(ax, provenance, [words, *notes])
    return ax


def plot_busy_share(
    times: pd.DataFrame, ax: Axes | None = None, *, title: str, provenance: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
) -> Axes:  # fmt: skip
    """Draw in how much of each timed round a kernel ran, a mark a round; bars and words are of that of median length.

    Args:
        times: of `kdlab.profiling.round_times`.
        ax: where to draw; a new figure when None.
        title: of the figure.
        provenance: adds the line that says on what it was timed.
        notes: put before the provenance.

    Raises:
        ArgumentError: no rounds.
    """
    if times.empty:
        raise ArgumentError("times", "lines of round_times", "none")
    groups = list(times.groupby(["case", "mode"], sort=False))
    middle = middle_times(times).set_index(["case", "mode"])
    ax = theme.new_axes(ax, (theme.REPORT_INCHES, 1.5 + 0.58 * len(groups)))
    for place, ((case, mode), rows) in enumerate(groups):
        share = (rows["busy_us"] / rows["span_us"]).to_numpy(dtype=float)
        shown = middle.loc[(case, mode)]
        busy, span, gap = shown["busy_us"] / shown["span_us"], shown["span_us"], shown["gap_us"]
        colour = theme.BLUE if mode == "graph" else "white"
        ax.barh([place], [busy], height=0.42, facecolor=colour, edgecolor=theme.BLUE, zorder=2)
        ax.plot(share, [place] * len(share), linestyle="none", marker="|", markersize=11, color=theme.BLACK, zorder=3)
        words = f"{busy:.1%} of {span:,.0f} µs; {shown['launches']:.0f} launches, gaps {gap:,.0f} µs"
        ax.annotate(words, (0.0, place - 0.37), xytext=(1, 0), textcoords="offset points", va="center",
                    fontsize=theme.TICK_PT, color=theme.GREY)  # fmt: skip
    names = [f"{theme.wrapped(case, _LABEL_INCHES, theme.TICK_PT)}\n{_MODES[mode]}" for (case, mode), _ in groups]
    ax.set_yticks(range(len(groups)), names)
    ax.set_ylim(len(groups) - 0.4, -0.7)
    ax.set_xlim(0.0, 1.0)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    theme.style_axes(ax, title=title, xlabel="share of the round in which a kernel runs, a line a round", ylabel="",
                     grid="x")  # fmt: skip
    theme.add_caption(ax, provenance, notes)
    return ax


def _lines(shares: pd.DataFrame) -> list[tuple[str, str]]:
    """(phase, stage) of every line: a phase, with stage "", and below it its stages where it has several."""
    found = []
    for phase, rows in shares.groupby("phase", sort=False):
        stages = list(dict.fromkeys(rows["stage"]))
        found.append((str(phase), ""))
        found += [(str(phase), stage) for stage in stages] if len(stages) > 1 else []
    return sorted(found, key=lambda line: (*PHASES, IDLE).index(line[0]))


def _draw_shares(ax: Axes, shares: pd.DataFrame, lines: list[tuple[str, str]], modes: list[str]) -> None:
    for mode in modes:
        own = shares[shares["mode"] == mode]
        phases, stages = own.groupby("phase")["share"].sum(), own.set_index(["phase", "stage"])["share"]
        for place, (phase, stage) in enumerate(lines):
            share = float(stages.get((phase, stage), 0.0) if stage else phases.get(phase, 0.0))
            at = place + (len(modes) - 1) * _BAR * (modes.index(mode) - 0.5)
            colour = theme.mix(to_rgb(PHASE_COLOURS[phase]), 0.55 if stage else 1.0)
            face = colour if mode == modes[0] else "white"
            ax.barh([at], [share], height=0.9 * _BAR, facecolor=face, edgecolor=colour, linewidth=1.0, zorder=2)
            # A number a stage: those of the other mode would stand on each other, and say the same of the stages.
            if share >= 0.0005 and (mode == modes[0] or not stage):
                ax.annotate(_percent(share), (share, at), xytext=(3, 0), textcoords="offset points", va="center",
                            fontsize=theme.CAPTION_PT - 1.0, color=theme.GREY)  # fmt: skip
    ax.set_xlim(0.0, 1.2 * max(float(shares.groupby(["mode", "phase"])["share"].sum().max()), 0.1))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _percent(share: float) -> str:
    return f"{100.0 * share:.{0 if share >= 0.0995 else 1}f} %"


def _length(shares: pd.DataFrame, mode: str, cases: list[str]) -> str:
    """How long the drawn round of each case is."""
    sums = shares[shares["mode"] == mode].groupby("case")["us"].sum()
    return ": " + ", ".join(f"{sums[case]:,.0f} µs" for case in cases if case in sums)


def _gaps(rows: pd.DataFrame) -> np.ndarray:
    """[G, 2] starts and ends of the stretches in which nothing runs; what the clock cannot tell apart is left out."""
    rows = rows.sort_values("start_us")
    ends = rows["end"].cummax().to_numpy(dtype=float)[:-1]
    starts = rows["start_us"].to_numpy(dtype=float)[1:]
    found = np.stack([ends, starts], axis=1)
    return found[found[:, 1] - found[:, 0] > _LEAST_GAP_US]


def _draw_bars(ax: Axes, spans: np.ndarray, place: int, colour: str, edge: float = 0.4) -> None:
    low, high = place - 0.36, place + 0.36
    corners = [[(begin, low), (end, low), (end, high), (begin, high)] for begin, end in spans]
    # Edges of the same colour keep a launch of less than a pixel's width in sight.
    look: dict[str, Any] = {"facecolors": colour, "edgecolors": colour, "linewidths": edge, "snap": False}
    ax.add_collection(PolyCollection(corners, zorder=3, **look))
