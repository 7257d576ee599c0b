"""Figures of experts and bytes: every number of the table is drawn."""

import pandas as pd
import pytest

from kdlab.errors import ArgumentError
from kdlab.viz.experts import plot_expert_curves, plot_step_bytes
from kdlab.viz.theme import png_bytes

FACTS = {"gpu": "GPU X", "git_commit": "0123456789"}


def test_expert_curves_draw_the_mean_over_layers():
    rows = [(kind, n, layer, n * (layer + 1), 0, 0, 1) for kind in ("tree", "text") for n in (1, 8) for layer in (0, 1)]
    curves = pd.DataFrame(rows, columns=["kind", "rows", "layer", "distinct", "p10", "p90", "picks"])
    ax = plot_expert_curves(
        curves, num_experts=24, independent={1: 4.0, 8: 18.0}, exponents={"text": 0.7}, provenance=FACTS
    )
    drawn = {line.get_label(): list(line.get_ydata()) for line in ax.lines}
    assert drawn["a tree's rows, best first"] == [1.5, 12.0]
    assert drawn["tokens that follow one another (g 0.70)"] == [1.5, 12.0]
    assert drawn["independent routing"] == [4.0, 18.0]
    assert "GPU X" in ax.texts[-1].get_text()
    png_bytes(ax, 60)
    with pytest.raises(ArgumentError, match="curves"):
        plot_expert_curves(curves[:0], num_experts=24, independent={1: 4.0})


def test_bars_of_bytes_add_up_and_small_stages_are_one():
    rows = [(n, f"stage {i}", (i + 1) * n * 2**30) for n in (1, 8) for i in range(9)]
    table = pd.DataFrame(rows, columns=["rows", "stage", "bytes"])
    ax = plot_step_bytes(table, totals={"other routing": {1: 50 * 2**30, 8: 400 * 2**30}})
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[-1] == "all else"
    assert tops(ax) == pytest.approx([45, 360])
    assert ax.lines[0].get_ydata() == pytest.approx([50, 400])
    png_bytes(ax, 60)


def test_a_stage_that_some_rounds_lack_takes_nothing_from_the_others():
    rows = [(n, f"stage {i}", 2**30) for n in (1, 8) for i in range(4) if (n, i) != (1, 1)]
    assert tops(plot_step_bytes(pd.DataFrame(rows, columns=["rows", "stage", "bytes"]))) == pytest.approx([3, 4])


def tops(ax):
    return [max(bar.get_y() + bar.get_height() for bar in ax.patches if round(bar.get_x() + 0.36) == x) for x in (0, 1)]
