"""Figures of a profiled round: every share, launch, gap, byte and ceiling of the tables is drawn where they say."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from kdlab.errors import ArgumentError
from kdlab.profiling.round_tables import (
    IDLE,
    kernel_use,
    middle_round,
    round_times,
    stage_shares,
    stage_traffic,
)
from kdlab.viz import (
    counter_findings,
    plot_busy_share,
    plot_roofline,
    plot_stage_bytes,
    plot_stage_shares,
    plot_tensor_use,
    plot_timeline,
    png_bytes,
    round_findings,
)
from kdlab.viz.nsight import PHASE_COLOURS
from tests.profiling.rounds import SMALL, STAGES, WIDE, profiled

FACTS = {"gpu": "GPU X", "git_commit": "0123456789"}
CEILINGS = {"bytes_per_s": 4e12, "flops_per_s": 8e14}


@pytest.fixture(scope="module")
def launches():
    return profiled()


@pytest.fixture(scope="module")
def traffic(launches):
    return stage_traffic(launches)


def labels(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def widths(ax, filled):
    bars = [bar for bar in ax.patches if (bar.get_facecolor()[:3] != (1.0, 1.0, 1.0)) == filled]
    return [bar.get_width() for bar in bars]


def test_shares_of_every_phase_and_stage_are_bars_of_a_panel_a_case(launches):
    shares = stage_shares(launches)
    figure = plot_stage_shares(shares, title="Shares", provenance=FACTS, notes=["recorded"])
    assert [ax.get_title(loc="left").replace("\n", " ") for ax in figure.axes] == [WIDE, SMALL]
    names = labels(figure.axes[0])
    for ax, case in zip(figure.axes, (WIDE, SMALL), strict=True):
        for mode, filled in (("graph", True), ("eager", False)):
            own = shares[(shares["case"] == case) & (shares["mode"] == mode)]
            expected = own.set_index("stage")["share"].to_dict() | own.groupby("phase")["share"].sum().to_dict()
            drawn = dict(zip(names, widths(ax, filled), strict=True))
            assert drawn == pytest.approx({name: expected[name] for name in names})
    weights = {label.get_text(): label.get_fontweight() for label in figure.axes[0].get_yticklabels()}
    assert (weights["verify"], weights["experts"], weights[IDLE]) == ("bold", "normal", "bold")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[0] == "one CUDA graph: 338 µs, 66 µs"
    assert "recorded · GPU X" in figure.get_supxlabel()
    png_bytes(figure, 60)


def test_one_mode_alone_is_filled(launches):
    eager = stage_shares(launches[launches["mode"] == "eager"])
    figure = plot_stage_shares(eager[eager["case"] == WIDE], title="Shares")
    assert len(widths(figure.axes[0], True)) == len(labels(figure.axes[0]))
    png_bytes(figure, 60)


def test_the_timeline_has_a_bar_a_launch_and_the_gaps_between_them(launches):
    rows = middle_round(launches, WIDE, "graph")
    ax = plot_timeline(rows, title="Graph", provenance=FACTS, notes=["recorded"])
    names = labels(ax)
    assert names[0] == IDLE
    drawn = {}
    for collection in ax.collections:
        for path in collection.get_paths():
            low, high = path.vertices.min(axis=0), path.vertices.max(axis=0)
            drawn.setdefault(names[round((low[1] + high[1]) / 2)], []).append((low[0], high[0]))
    for stage in ("experts", "norms", "commit"):
        own = rows[rows["stage"] == stage]
        expected = np.stack([own["start_us"], own["start_us"] + own["duration_us"]], axis=1)
        assert np.array(drawn[stage]) == pytest.approx(expected)
    times = round_times(launches).query("case == @WIDE and mode == 'graph' and repeat == 1").iloc[0]
    assert sum(end - begin for begin, end in drawn[IDLE]) == pytest.approx(times["gap_us"])
    words = f"{len(STAGES) + 1} launches, {len(drawn[IDLE])} gaps of 44 µs together · recorded"
    assert words in ax.texts[-1].get_text()
    png_bytes(ax, 60)


def test_a_timeline_may_end_early(launches):
    rows = middle_round(launches, WIDE, "graph")
    assert plot_timeline(rows, title="Begin", until_us=50.0).get_xlim() == (0.0, 50.0)
    end = (rows["start_us"] + rows["duration_us"]).max()
    assert plot_timeline(rows, title="All").get_xlim() == (0.0, pytest.approx(end))


def test_busy_shares_are_of_the_round_of_median_length_with_a_line_a_round(launches):
    times = round_times(launches)
    ax = plot_busy_share(times, title="Busy", provenance=FACTS)
    shares = stage_shares(launches).query("stage != 'nothing runs'").groupby(["case", "mode"], sort=False)["share"]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx(shares.sum().to_list())
    assert [len(line.get_xdata()) for line in ax.lines] == [3, 3, 3, 3]
    assert ax.texts[0].get_text() == "87.1% of 338 µs; 32 launches, gaps 44 µs"
    png_bytes(ax, 60)


def test_bytes_stand_beside_the_least(traffic):
    ax = plot_stage_bytes(traffic, title="Bytes", provenance=FACTS)
    assert labels(ax) == traffic["stage"].tolist()
    assert [bar.get_width() for bar in ax.patches] == traffic["bytes"].tolist()
    assert [line.get_xdata()[0] for line in ax.lines] == traffic["floor_bytes"].tolist()
    words = {stage: text.get_text() for stage, text in zip(traffic["stage"], ax.texts, strict=False)}
    assert words["experts"] == "132 MB, 4.40 ×"
    png_bytes(ax, 60)
    unknown = traffic.assign(bytes=np.nan, floor_bytes=np.nan)
    ax = plot_stage_bytes(unknown, title="Bytes")
    assert {text.get_text() for text in ax.texts} == {"not counted"}
    png_bytes(ax, 60)


def test_the_roofline_has_both_ceilings_and_a_mark_a_stage_with_operations(traffic):
    ax = plot_roofline(traffic, **CEILINGS, title="Roofline", provenance=FACTS)
    roof, *marks = ax.lines
    assert roof.get_xdata()[1] == pytest.approx(200.0)  # operations a byte at the ridge
    assert list(roof.get_ydata())[1:] == [800.0, 800.0]
    assert roof.get_ydata()[0] == pytest.approx(roof.get_xdata()[0] * 4.0)
    own = traffic[traffic["flops"] > 0]
    places = [(mark.get_xdata()[0], mark.get_ydata()[0]) for mark in marks]
    expected = np.stack([own["flops"] / own["bytes"], own["flops"] / own["us"] / 1e6], axis=1)
    assert np.array(places) == pytest.approx(expected)
    assert {text.get_text() for text in ax.texts} >= {"experts", "read 4.00 TB/s", "matrix units 800 TFLOP/s"}
    assert "no place here: draft context" in ax.texts[-1].get_text()
    png_bytes(ax, 60)


def test_operations_that_were_not_counted_are_hollow_marks(traffic):
    ax = plot_roofline(traffic.assign(flops_counted=False), **CEILINGS, title="Roofline")
    assert {mark.get_markerfacecolor() for mark in ax.lines[1:]} == {"white"}
    assert "fewest operations, not counted" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_names_of_near_marks_do_not_lie_on_each_other(traffic):
    near = traffic[traffic["flops"] > 0].assign(bytes=1e8, flops=1e10, us=np.linspace(100.0, 101.0, 6))
    ax = plot_roofline(near, **CEILINGS, title="Roofline")
    shifts = [text.xyann for text in ax.texts if text.get_text() in set(near["stage"])]
    assert len(set(shifts)) == len(shifts) == 6


def test_use_of_the_matrix_units_and_the_memory(launches):
    use = kernel_use(launches)
    ax = plot_tensor_use(use, title="Use", provenance=FACTS)
    assert labels(ax)[0] == "experts_kernel\n144.0 µs in 2 launches"
    drawn = [bar.get_width() for bar in ax.patches]
    assert drawn == pytest.approx([*use["tensor_pct"].head(16), *use["dram_pct"].head(16)])
    assert f"{len(use) - 16} more kernels with 3.0% of the time" in ax.texts[-1].get_text()
    ax = plot_tensor_use(use.assign(tensor_pct=np.nan), title="Use")
    assert [text.get_text() for text in ax.texts][:16] == ["not counted"] * 16
    png_bytes(ax, 60)


def test_phases_have_colours_of_their_own():
    assert len({to_rgb(colour) for colour in PHASE_COLOURS.values()}) == len(PHASE_COLOURS)


def test_nothing_and_several_cases_at_once_are_refused(launches, traffic):
    none = launches.iloc[:0]
    for draw, table in (
        (plot_stage_shares, stage_shares(none)), (plot_timeline, none), (plot_busy_share, round_times(none)),
        (plot_stage_bytes, stage_traffic(none)), (plot_tensor_use, kernel_use(none)),
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            draw(table, title="")
    with pytest.raises(ArgumentError, match="operations"):
        plot_roofline(traffic.assign(flops=0.0), **CEILINGS, title="")
    both = traffic.assign(case=["a", "b"] * (len(traffic) // 2))
    with pytest.raises(ArgumentError, match="one case, got a, b"):
        plot_stage_bytes(both, title="")


def test_findings_say_length_phases_gaps_bytes_and_use(launches, traffic):
    words = round_findings(stage_shares(launches), round_times(launches)).split("\n")
    assert len(words) == 4
    length = "**338 µs** (of 3 rounds, 310 to 368)"
    assert words[0].startswith(f"- {WIDE}, as one CUDA graph: {length}, verify 74%, draft 9%; the largest")
    assert "experts with 35%. Nothing runs for **44 µs** (12.9%) between 32 launches." in words[0]
    use = kernel_use(launches)
    bytes_words, use_words = counter_findings(traffic, use).split("\n")
    assert "0.33 GB" in bytes_words
    assert "the most beyond it by experts: 132 MB, least 30 MB." in bytes_words
    kept = "keeps the matrix units **55 %** and the memory **40 %** busy."
    assert use_words == f"- experts_kernel takes 41% of the kernels' time and {kept}"
    none = counter_findings(traffic.assign(floor_bytes=np.nan), use.assign(tensor_pct=np.nan, dram_pct=np.nan))
    assert none == "- experts_kernel takes 41% of the kernels' time and was not counted."
