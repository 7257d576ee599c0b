"""Figures of the kernel benchmark: every arm, bound and goal of the table is drawn where the table says."""

import pandas as pd
import pytest

from kdlab.bench.kernels import error_table, graph_times, kernel_table
from kdlab.errors import ArgumentError
from kdlab.viz import plot_bytes_read, plot_kernel_dots, plot_kernel_errors, plot_kernel_growth, png_bytes
from tests.bench.samples import kernel_rows

FACTS = {"gpu": "GPU X", "git_commit": "0123456789"}


@pytest.fixture(scope="module")
def rows():
    return kernel_rows()


@pytest.fixture(scope="module")
def table(rows):
    return graph_times(kernel_table(rows))


def points(ax):
    """(x, y) of every mark that stands alone."""
    lines = [line for line in ax.lines if line.get_linestyle() == "None" and len(line.get_xdata()) == 1]
    return {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in lines}


def test_an_arm_is_compared_in_a_graph_where_a_graph_holds_it(rows):
    table = graph_times(kernel_table(rows))
    assert not table.duplicated(["op", "case", "impl"]).any()
    assert table.set_index("impl")["mode"].to_dict()["host heap"] == "eager"
    assert set(table.loc[table["impl"] != "host heap", "mode"]) == {"graph"}


def test_dots_show_every_time_bound_and_goal(table):
    ax = plot_kernel_dots(table, title="All ops", provenance=FACTS, notes=["recorded"])
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names[0] == "verify_attention  S=1 N=33 prefix=256 H=64"
    assert len(names) == 10
    assert {x for x, _ in points(ax)} == set(table["us"])
    bars = [line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 2]
    assert set(bars) == set(table["floor_us"]) | set(table["goal_us"].dropna())
    labels = ", ".join(text.get_text() for text in ax.get_legend().get_texts())
    assert labels == "wgmma, mma, naive, flashmla prefix, cuda, torch, host heap (eager), bound of this card, goal"
    assert "recorded · GPU X" in ax.texts[-1].get_text()
    png_bytes(ax, 60)


def test_cases_of_one_op_do_not_repeat_its_name(table):
    ax = plot_kernel_dots(table[table["op"] == "moe_int4"], title="Experts")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["S=1 N=33 I=2048 uniform"]


def test_growth_has_a_line_an_arm_and_the_bound(table):
    attention = table[(table["op"] == "verify_attention") & (table["heads"] == 64)]
    figure = plot_kernel_growth({"33 rows": attention}, x={"33 rows": "prefix"}, title="Attention", provenance=FACTS)
    (ax,) = figure.axes
    drawn = {tuple(line.get_ydata()) for line in ax.lines}
    assert drawn >= {(12.0, 18.0, 40.0), (18.0, 24.0, 50.0), tuple(attention.drop_duplicates("prefix")["floor_us"])}
    dashed = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert [tuple(line.get_ydata()) for line in dashed] == [(18.0, 24.0, 50.0)]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["wgmma", "mma", "naive", "flashmla prefix", "bound of this card", "goal"]
    assert "GPU X" in figure.get_supxlabel()
    png_bytes(figure, 60)


def test_growth_refuses_what_is_no_line(table):
    attention = table[(table["op"] == "verify_attention") & (table["heads"] == 64)]
    for panels in ({}, {"a": pd.concat([attention, attention])}):
        with pytest.raises(ArgumentError, match="panels"):
            plot_kernel_growth(panels, x=dict.fromkeys(panels, "prefix"), title="")


def test_a_panel_that_was_not_timed_says_so(table):
    attention = table[(table["op"] == "verify_attention") & (table["heads"] == 64)]
    panels = {"timed": attention, "cut": attention.iloc[:0]}
    figure = plot_kernel_growth(panels, x=dict.fromkeys(panels, "prefix"), title="Attention")
    assert [[text.get_text() for text in ax.texts] for ax in figure.axes] == [[], ["not timed in this run"]]
    png_bytes(figure, 60)


def test_errors_say_what_is_exact(rows):
    errors = error_table(rows)
    errors.loc[errors["op"] == "tree_build", "error"] = 0.0
    ax = plot_kernel_errors(errors, provenance=FACTS)
    words = {label.get_text(): text.get_text() for label, text in zip(ax.get_yticklabels(), ax.texts, strict=False)}
    assert words["tree_build: cuda"] == "exact"
    assert words["verify_attention: wgmma"] == "2.0e-03"
    assert len(words) == len(errors.drop_duplicates(["op", "impl"]))
    png_bytes(ax, 60)
    with pytest.raises(ArgumentError, match="errors"):
        plot_kernel_errors(errors.iloc[:0])


def test_bytes_are_said_in_multiples_of_the_least():
    counted = pd.DataFrame({
        "impl": ["naive", "wgmma"], "l1_read": [9e9, 0.0], "l2_read": [8e9, 5e6], "dram_read": [5e6, float("nan")],
    })  # fmt: skip
    ax = plot_bytes_read(counted, 5e6, title="Bytes")
    words = [text.get_text() for text in ax.texts]
    assert words == ["1,800.0 ×", "0.0 ×", "1,600.0 ×", "1.0 ×", "1.0 ×", "not counted"]
    png_bytes(ax, 60)
