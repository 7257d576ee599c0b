"""Phase figures draw every field and mark; the sentences say what the table says, and turn with it."""

import numpy as np
import pandas as pd
import pytest

from kdlab.errors import ArgumentError
from kdlab.study.phase import COMPARISONS, COSTS, OPEN, PAYS, RoundCost
from kdlab.study.step_fit import floor_fit
from kdlab.viz import theme
from kdlab.viz.phase import Mark, plot_budget_phase, plot_regions
from kdlab.viz.phase_words import answer, assumptions, marks_table, region_table, turning_points
from tests.study.k26 import DRAFTER, TARGET


def phases(gain=lambda work, g, streams, name: 0.1 - 0.05 * streams + 0.1 * (1 - g)):
    """Made-up phases whose call is that of a gain without noise."""
    rows = []
    for work in (1.5, 2.5, 3.5):
        for g in (0.7, 0.85, 1.0):
            for streams in (1, 4):
                for context in (1024, 8192):
                    for name in COMPARISONS:
                        value = gain(work, g, streams, name)
                        call = PAYS if value > 0.01 else COSTS if value < -0.01 else OPEN
                        rows.append((work, g, streams, context, name, value, call, 7.0))
    names = ["work", "g", "streams", "context", "comparison", "gain", "call", "budget"]
    return pd.DataFrame(rows, columns=names)


def test_regions_have_a_panel_a_row_and_streams_and_every_mark():
    table = phases()
    one = table[table["context"] == 1024]
    marks = [Mark("published: A", 2.0), Mark("published: A", 3.0), Mark("the mini", 2.2, 0.6)]
    figure = plot_regions(one, "comparison", marks=marks, xlabel="x", provenance={"gpu": "GPU X"})
    panels = [ax for ax in figure.axes if ax.get_subplotspec() is not None]
    assert len(panels) == 2 * len(COMPARISONS)
    mesh = panels[0].collections[0].get_array()
    assert np.asarray(mesh).ravel() == pytest.approx(
        one[(one["comparison"] == next(iter(COMPARISONS))) & (one["streams"] == 1)].sort_values(["g", "work"])["gain"]
    )
    stars = {(line.get_xdata()[0], line.get_marker()) for line in panels[0].lines if line.get_marker() in "v*"}
    assert stars == {(2.0, "v"), (3.0, "v"), (2.2, "*")}
    theme.png_bytes(figure, 60)
    with pytest.raises(ArgumentError, match="phases"):
        plot_regions(table, "comparison", xlabel="x")


def test_budgets_stand_above_the_other_methods_and_the_best_is_framed():
    rows = [(s, 1024, arm, 1.0 + 0.1 * place, arm == "7") for s in (1, 8)
            for place, arm in enumerate(["3", "7", "chain", "adaptive chain"])]  # fmt: skip
    figure = plot_budget_phase(pd.DataFrame(rows, columns=["streams", "context", "arm", "over_ar", "best"]))
    ax = figure.axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["chain", "adaptive chain", "3", "7"]
    assert sum(text.get_bbox_patch() is not None for text in ax.texts) == 2
    assert [text.get_text() for text in ax.texts if text.get_position() == (0, 3)] == ["1.10"]
    theme.png_bytes(figure, 60)
    missing = pd.DataFrame(rows, columns=["streams", "context", "arm", "over_ar", "best"])
    missing.loc[1, "over_ar"] = np.nan
    figure = plot_budget_phase(missing)
    assert [text.get_text() for text in figure.axes[0].texts if text.get_position() == (0, 3)] == [""]
    assert "left out: more rows in all, or more streams at a context" in figure.get_supxlabel()


def test_the_answer_says_where_a_tree_is_faster_and_where_slower():
    first = answer(phases()).splitlines()[0]
    assert first.startswith("**Of 36 points (text, routing, streams, context) a tree of one size is clearly faster")
    assert "every chain of one length at 50%, clearly slower at 50%." in first
    assert "it is faster at 50% (with 1 stream, by up to +8.0 %), slower at 50%; a tree that is cut so too" in first
    nowhere = answer(phases(lambda work, g, streams, name: -0.2))
    assert "where the draft is unsure, it is faster at none, slower at 100%;" in nowhere
    assert "pays at no point" in nowhere
    best = list(COMPARISONS)[1]
    others = answer(phases(lambda work, g, streams, name: -0.2 if name == best else 0.2))
    assert "every chain of one length at 100%, clearly slower at none." in others
    assert "it is faster at none, slower at 100%; a tree that is cut so too is faster at 100%, slower at none" in others
    assert others.count("pays at 100% of 36 points") == 2
    one = phases(lambda work, g, streams, name: 0.2)
    many = pd.concat([one] * 4).assign(call="open")
    many.iloc[0, many.columns.get_loc("call")] = PAYS
    assert "clearly faster than AR and every chain of one length at less than 1%" in answer(many)
    assert "it is faster at 100% (with 1 and 4 streams, by up to +20 %)" in answer(one)


def test_streams_that_were_not_recorded_at_a_context_are_no_points_and_said_to_be_none():
    whole = phases()
    table = whole[(whole["streams"] == 1) | (whole["context"] == 1024)]
    assert "**Of 27 points" in answer(table)
    assert "context; 4 streams at a context of 8,192 were never recorded and are none. A tree pays" in answer(table)
    assert "never recorded" not in answer(whole)
    best = table[table["comparison"] == list(COMPARISONS)[1]]
    figure = plot_regions(best, "context", xlabel="x")
    words = [[text.get_text() for text in ax.texts] for ax in figure.axes if ax.get_subplotspec() is not None]
    assert words == [[], [], [], ["not recorded"]]


def test_the_answer_names_the_routing_that_hard_and_easy_text_allow():
    table = phases(lambda work, g, streams, name: 0.5 - 0.5 * g if work < 3 and (work < 2 or g < 0.8) else -0.1)
    text = answer(table)
    assert "up to g = 0.85 on the hardest text (chain of 3: 1.50 tokens a round)" in text
    assert "up to g = 0.7 on the easiest where it pays at all (2.50)" in text


def test_the_region_has_a_line_a_comparison_and_streams_in_order():
    table = region_table(phases())
    assert table["comparison"].tolist() == [name for name in COMPARISONS for _ in range(2)]
    assert table[PAYS].tolist()[:2] == ["100%", "0%"]
    assert table["budgets, or cuts, that pay"].tolist()[:2] == ["7", "-"]


def test_the_basis_says_whether_rounds_were_measured():
    cost = RoundCost(floor_fit(TARGET, DRAFTER), TARGET, DRAFTER)
    lines = assumptions(cost, 24)
    assert any("No round is recorded" in line for line in lines)
    assert any("modelled, 8 µs each" in line for line in lines)
    assert any("24 prompts" in line for line in lines)


def test_what_would_turn_it_is_in_numbers():
    pairs = pd.DataFrame({"drafter": ["d", "d"], "gain": [-0.4, -0.1]})
    others = {"A": ("all gained", phases(lambda *_: 0.2)), "B": ("all lost", phases(lambda *_: -0.2))}
    lines = turning_points(phases(), others, pairs)
    assert lines[1].startswith("**A.** With all gained it pays at 100% of the points instead of 50%")
    assert lines[2].startswith("**B.** With all lost it pays at 0% of the points instead of 50%")
    assert "−40 to −10 %" in lines[-1]
    assert len(turning_points(phases(), others, pairs[:0])) == len(lines) - 1


def test_marked_points_have_a_line_each():
    table = marks_table(phases(), {1.5: "one", 2.5: "two", 3.5: "three"})
    assert table["figure"].tolist() == ["one", "one", "two", "two", "three", "three"]
    assert table.iloc[0][next(iter(COMPARISONS))] == "+5.0 to +8.0 % (pays)"
