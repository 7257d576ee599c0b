"""Figures of experts and cost: every number of the table is drawn."""

import pandas as pd
import pytest

from kdlab.errors import ArgumentError
from kdlab.viz.experts import plot_arm_speeds, plot_expert_curves, plot_phase, plot_step_bytes
from kdlab.viz.theme import png_bytes

FACTS = {"gpu": "GPU X", "git_commit": "0123456789"}


def test_expert_curves_draw_the_mean_over_layers():
    rows = [(kind, n, layer, n * (layer + 1), 0, 0, 1) for kind in ("tree", "text") for n in (1, 8) for layer in (0, 1)]
    curves = pd.DataFrame(rows, columns=["kind", "rows", "layer", "distinct", "p10", "p90", "picks"])
    ax = plot_expert_curves(curves, num_experts=24, independent={1: 4.0, 8: 18.0}, provenance=FACTS)
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
    assert drawn["a tree's rows, best first"] == [1.5, 12.0]
    assert drawn["independent routing"] == [4.0, 18.0]
    assert "GPU X" in ax.texts[-1].get_text()
    png_bytes(ax, 60)
    with pytest.raises(ArgumentError, match="curves"):
        plot_expert_curves(curves[:0], num_experts=24, independent={1: 4.0})


def test_bars_of_bytes_add_up_and_small_stages_are_one():
    rows = [(n, f"stage {i}", (i + 1) * n * 2**30) for n in (1, 8) for i in range(9)]
    table = pd.DataFrame(rows, columns=["rows", "stage", "bytes"])
    ax = plot_step_bytes(table)
    assert [text.get_text() for text in ax.get_legend().get_texts()][-1] == "all else"
    tops = [max(bar.get_y() + bar.get_height() for bar in ax.patches if round(bar.get_x() + 0.36) == x) for x in (0, 1)]
    assert tops == pytest.approx([45, 360])
    png_bytes(ax, 60)


def test_speeds_have_a_point_an_arm_and_a_line_a_control():
    rows = [("ddtree", 7, 90.0), ("ddtree", 31, 80.0), ("chain", 3, 70.0), ("ar", 0, 40.0)]
    rows.append(("adaptive_chain", 0.1, 85.0))
    ax = plot_arm_speeds(pd.DataFrame(rows, columns=["method", "setting", "tok_s"]), provenance=FACTS)
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
    assert drawn["tree, by its budget"] == [90.0, 80.0]
    assert drawn["best adaptive chain"] == [85.0, 85.0]
    png_bytes(ax, 60)


def test_phase_fields_say_gain_and_budget():
    rows = [("code", g, s, c, 0.1 * s - g, 7.0) for g in (0.7, 1.0) for s in (1, 8) for c in (1024, 8192)]
    phases = pd.DataFrame(rows, columns=["profile", "g", "streams", "context", "gain", "budget"])
    figure = plot_phase(phases, marks=[(0.8, 8, "somewhere")], provenance=FACTS, notes=["predicted"])
    texts = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert texts.count("-60 %\nB 7") == 2
    assert len(texts) == len(phases)
    assert all(len(ax.lines) == 1 for ax in figure.axes)
    png_bytes(figure.axes[0], 60)
