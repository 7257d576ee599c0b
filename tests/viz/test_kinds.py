"""Trees and chains by kind of text: panels and sentences, both of them from the table."""

import pandas as pd
import pytest

from kdlab.errors import ArgumentError
from kdlab.viz import kind_findings, percent, plot_by_kind, png_bytes


def four_kinds(num_prompts=12):
    """Chains of 1 to 3 and trees of 1 to 64 nodes; the better the kind, the later the tree is ahead."""
    rows = []
    for kind, best in (("code", 3.0), ("math", 2.0), ("structured", 6.0), ("prose", 9.0)):
        arms = [("chain", length, best - 0.1 * (3 - length)) for length in (1, 2, 3)]
        arms += [("ddtree", budget, 1.0 + budget / 10.0) for budget in range(1, 65)]
        for method, setting, tokens in arms:
            interval = {"tokens_per_round_low": tokens - 0.1, "tokens_per_round_high": tokens + 0.1}
            rows.append({"kind": kind, "method": method, "setting": setting, "rows_per_round": setting + 1,
                         "tokens_per_round": tokens, "num_prompts": num_prompts, **interval})  # fmt: skip
    return pd.DataFrame(rows)


def test_each_kind_has_a_panel_and_its_best_chain(by_kind):
    figure = plot_by_kind(by_kind, provenance={"gpu": "GPU X"})
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == ["prose (3 prompts)", "sums (3 prompts)"]
    for ax, kind in zip(figure.axes, ("prose", "sums"), strict=True):
        chains = by_kind[(by_kind["kind"] == kind) & (by_kind["method"] == "chain")]
        best = chains.loc[chains["tokens_per_round"].idxmax()]
        (dotted,) = [line for line in ax.lines if line.get_linestyle() == ":"]
        assert set(dotted.get_ydata()) == {best["tokens_per_round"]}
        assert f"length {best['setting']:g}, {best['tokens_per_round']:.2f}" in ax.texts[0].get_text()
        assert dotted.get_color() == ax.texts[0].get_color()
    assert "GPU X" in figure.get_supxlabel()


def test_loops_are_marked_in_their_panel():
    figure = plot_by_kind(four_kinds(), loops=["structured"])
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "code (12 prompts)", "math (12 prompts)", "structured (12 prompts): repeats itself", "prose (12 prompts)",
    ]  # fmt: skip
    assert len({line.get_color() for ax in figure.axes for line in ax.lines if line.get_linestyle() == ":"}) == 4
    png_bytes(figure, 50)


def test_three_kinds_leave_a_panel_empty_and_axes_may_be_given():
    three = four_kinds().query("kind != 'prose'")
    figure = plot_by_kind(three)
    assert [ax.axison for ax in figure.axes] == [True, True, True, False]
    assert plot_by_kind(three, figure.axes[:3]) is figure
    with pytest.raises(ArgumentError, match="axes"):
        plot_by_kind(three, figure.axes[:2])


def test_findings_name_the_first_budget_ahead_and_the_gains():
    code, math, structured, prose = kind_findings(four_kinds(), [7, 15, 31, 64]).split("\n")[:4]
    assert "**code**, 12 prompts: the best chain (length 3) brings 3.00 tokens per round" in code
    assert "first beats it at budget 21 (22 rows): −43 % at budget 7, −17 % at budget 15, +37 % at budget 31" in code
    assert "at budget 11 (12 rows)" in math
    assert "at budget 51 (52 rows)" in structured
    assert "no tree of up to budget 64 beats it" in prose


def test_the_mean_leaves_loops_out():
    table = four_kinds()
    assert kind_findings(table) == kind_findings(table, [7, 15, 31, 64])
    *lines, mean = kind_findings(table, [31], loops=["structured", "prose"]).split("\n")
    assert [("loop" in line) for line in lines] == [False, False, True, True]
    expected = percent((4.1 / 3 + 4.1 / 2) / 2 - 1)
    assert mean == f"- Mean over the 2 kinds without structured, prose: {expected} at budget 31."
    assert "Mean over the 4 kinds:" in kind_findings(table, [31])
    one_left = kind_findings(table, [31], loops=["structured", "prose", "math"])
    assert "Mean" not in one_left


def test_few_prompts_and_budgets_outside_the_sweep(by_kind):
    found = kind_findings(by_kind)
    assert "too few for an interval" in found
    assert "at budget 31" in found
    assert "at budget 64" not in found
    with pytest.raises(ArgumentError, match="999"):
        kind_findings(by_kind, [999])


def test_tables_without_kinds_chains_or_the_named_loops_are_refused(summary, by_kind):
    with pytest.raises(ArgumentError, match="kind"):
        kind_findings(summary)
    with pytest.raises(ArgumentError, match="chains for prose"):
        kind_findings(by_kind[by_kind["method"] != "chain"])
    with pytest.raises(ArgumentError, match="trees for prose"):
        kind_findings(by_kind[by_kind["method"] == "chain"])
    for loops in (["poems"], "prose"):
        with pytest.raises(ArgumentError, match="loops"):
            kind_findings(by_kind, loops=loops)
        with pytest.raises(ArgumentError, match="loops"):
            plot_by_kind(by_kind, loops=loops)
