"""Figures of round times: every point is drawn, what is predicted is hollow and says so."""

import pandas as pd
import pytest

from kdlab.errors import ArgumentError
from kdlab.study.step_fit import WHOLE
from kdlab.viz import theme
from kdlab.viz.round_cost import plot_gpus, plot_round_fit, plot_speed_panels

NAMES = ["stage", "measured_us", "fitted_us", "residual"]


def test_every_recorded_time_has_a_point_in_both_panels():
    rows = [(f"stage {i}", 10.0 * (i + 1), 11.0 * (i + 1), 0.1) for i in range(9)] + [(WHOLE, 600.0, 500.0, -1 / 6)]
    points = pd.DataFrame(rows, columns=NAMES)
    several = pd.DataFrame([("", 700.0, 650.0, -0.07)], columns=NAMES)
    figure = plot_round_fit(points, several, notes=["recorded"])
    upper, lower = figure.axes
    for ax, column in ((upper, "fitted_us"), (lower, "residual")):
        drawn = sorted(y for line in ax.lines if line.get_linestyle() == "None" for y in line.get_ydata())
        wanted = [*points[column], *several[column]]
        assert drawn == pytest.approx(sorted(100 * y if column == "residual" else y for y in wanted))
    theme.png_bytes(figure, 60)
    with pytest.raises(ArgumentError, match="points"):
        plot_round_fit(points[:0])


def test_speeds_have_a_point_an_arm_and_a_line_for_what_adapts():
    rows = [("ddtree", 7, 90.0), ("ddtree", 31, 80.0), ("chain", 3, 70.0), ("ar", 0, 40.0)]
    rows += [("adaptive_chain", 0.1, 85.0), ("adaptive_chain", 0.2, 60.0), ("adaptive_tree", 0.1, 95.0)]
    table = pd.DataFrame(rows, columns=["method", "setting", "tok_s"])
    figure = plot_speed_panels({("1 stream", "hard"): table, ("1 stream", "easy"): table})
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["hard, 1 stream", "easy, 1 stream"]
    lines = [list(line.get_ydata()) for line in figure.axes[0].lines]
    assert lines == [[90.0, 80.0], [70.0], [95.0, 95.0], [85.0, 85.0], [40.0, 40.0]]
    theme.png_bytes(figure, 60)


def test_predicted_gpus_say_so_and_are_hollow():
    rows = [(s, c, gain) for s in (1, 8) for c in ("a", "b") for gain in (-0.1, 0.0, 0.2)]
    table = pd.DataFrame(rows, columns=["streams", "comparison", "gain"])
    figure = plot_gpus({"H200": table, "B200": table}, measured=["H200"])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["H200", "B200,\npredicted"]
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [line.get_markerfacecolor() == "white" for line in marks] == [False, False, True, True]
    assert list(marks[0].get_xdata()) == pytest.approx([-10, 0, 20])
    theme.png_bytes(figure, 60)
