"""The budget sweep on axes: the numbers of the tables, flags said on the chart, sentences made from the numbers."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from kdlab import study
from kdlab.errors import ArgumentError
from kdlab.viz import (
    acceptance_findings,
    best_sentence,
    cost_findings,
    paired_findings,
    percent,
    plot_budget_sweep,
    plot_cost,
    plot_speed,
    plot_tokens_per_round,
    png_bytes,
    speed_findings,
)
from tests.viz.samples import make_field


def drawn(ax, x):
    """Every y value that a line of `ax` has at `x`."""
    return [y for line in ax.lines for at, y in zip(*line.get_data(), strict=False) if at == x]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_acceptance_shows_the_table_and_says_that_the_bonus_counts(summary):
    ax = plot_tokens_per_round(summary)
    for row in summary[summary["method"].isin(("ar", "chain"))].to_dict("records"):
        assert row["tokens_per_round"] in drawn(ax, row["rows_per_round"])
    assert "bonus" in ax.get_ylabel()
    assert "rows" in ax.get_xlabel()
    assert [label.split(":")[0] for label in legend(ax)] == ["DDTree", "chain", "adaptive chain", "AR"]
    assert any("p < t" in label for label in legend(ax))
    ticks = ax.get_xticks().tolist()
    assert ticks == [2.0**power for power in range(6)]


def test_bands_are_left_out_where_there_is_no_interval(table):
    few = study.summarize(table[table["prompt"] < 3])
    assert few["tokens_per_round_low"].isna().all()
    png_bytes(plot_tokens_per_round(few), 50)


def test_truncated_and_simulated_points_are_marked_on_the_chart():
    short = study.summarize(study.sweep(make_field(top_k=4), [0, 2, 4, 8, 16], truncated=True))
    ax = plot_tokens_per_round(short.assign(simulated=True))
    assert any("recorded top K" in text for text in legend(ax))
    assert any("SIMULATED" in text.get_text() for text in ax.texts)
    hollow = [line for line in ax.lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert [sorted(line.get_xdata()) for line in hollow] == [[9.0, 17.0]]


def test_cost_and_speed_show_the_quotient(cost, speed, best):
    shown = plot_cost(cost.rows)
    assert "ms" in shown.get_ylabel()
    assert 4.0 in drawn(shown, 1)
    ax = plot_speed(speed, best=best)
    row = speed[(speed["method"] == "ddtree") & (speed["setting"] == best.budget)].iloc[0]
    assert row["tok_s"] == pytest.approx(1000 * row["tokens_per_round"] / row["round_ms"])
    assert drawn(ax, best.budget + 1).count(row["tok_s"]) >= 2
    assert any("best timed budget" in text for text in legend(ax))
    assert any("dashed" in text and "interpolated" in text for text in legend(ax))
    assert ax.get_title(loc="left").replace("\n", " ") == best_sentence(best).replace("\n", " ")


def test_lines_are_full_only_between_timed_points_and_only_those_are_filled(summary, cost):
    dense = study.speed(summary, cost, interpolate=True)
    ax = plot_speed(dense[dense["method"] == "ddtree"])
    marks = [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]
    hollow = [line for line in marks if line.get_markerfacecolor() == "white"]
    times = dense.set_index(["method", "rows_per_round"])["cost_source"]
    assert {x for line in hollow for x in line.get_xdata()} == set(range(6, 16))
    assert {x for line in marks if line not in hollow for x in line.get_xdata()} == {5, 16}
    assert times["ddtree", 5] == "measured" != times["ddtree", 6]
    dashes = [line.is_dashed() for line in ax.lines if line.get_linestyle() != "None" and len(line.get_xdata()) > 1]
    assert dashes == [True]
    timed = dense[dense["method"].isin(["ddtree"]) & dense["setting"].isin([4, 15])]
    assert not any(line.is_dashed() for line in plot_speed(timed).lines)


def test_three_curves_stand_side_by_side(summary, cost, speed, best):
    figure = plot_budget_sweep(summary, cost.rows, speed, best, provenance={"gpu": "GPU X", "git_commit": "abc123"})
    assert len(figure.axes) == 3
    (key,) = figure.legends
    assert f"budget {best.budget}" in key.get_title().get_text()
    labels = [text.get_text() for text in key.get_texts()]
    assert len(labels) == len(set(labels))
    assert {"DDTree", "chain", "AR"} < set(labels)
    assert all("rows: tokens verified" in ax.get_xlabel() for ax in figure.axes)
    assert "GPU X" in figure.get_supxlabel()
    assert "abc123" in figure.get_supxlabel()
    axes = plot_budget_sweep(summary, cost.rows, speed, best).axes
    assert plot_budget_sweep(summary, cost.rows, speed, best, axes) is axes[0].figure


def test_the_headline_gives_numbers_and_no_verdict(best):
    gain = replace(best, margin=0.2, margin_low=0.1, margin_high=0.3)
    loss = replace(best, margin=-0.2, margin_low=-0.3, margin_high=-0.1)
    for one in (gain, loss):
        said = best_sentence(one) + speed_findings(one)
        assert not any(word in said for word in ("a gain", "a loss", "settled", "call"))
    assert "+20 % over the best control" in best_sentence(gain)
    assert "+10 to +30 %, round times taken as exact" in best_sentence(gain)
    assert "−20 % against" in best_sentence(loss)
    few = replace(best, margin_low=float("nan"), margin_high=float("nan"), num_prompts=1)
    assert "no interval from 1 prompt" in best_sentence(few)
    assert best_sentence(best).startswith("Best timed budget")
    assert "timed" not in best_sentence(replace(best, budget_interpolated=True))


def test_few_prompts_are_not_called_cases(best):
    words = speed_findings(replace(best, num_prompts=3, selected_share=1.0))
    assert "100 %" not in words
    assert "other prompts may well" in words
    assert "over 99 %" in speed_findings(replace(best, selected_share=1.0))


def test_percentages_carry_a_sign_and_a_digit_where_it_matters():
    written = [percent(share) for share in (0.0, 0.013, -0.0567, 0.25, -1.0)]
    assert written == ["+0.0 %", "+1.3 %", "−5.7 %", "+25 %", "−100 %"]


def test_findings_come_from_the_tables(summary, speed, best):
    found = acceptance_findings(summary, [4, 15])
    tree = summary[(summary["method"] == "ddtree") & (summary["setting"] == 15)].iloc[0]
    assert f"budget 15: {tree['tokens_per_round']:.2f} tokens per round" in found
    with pytest.raises(ArgumentError, match="999"):
        acceptance_findings(summary, [999])
    costs = cost_findings(speed)
    assert "AR: 4 ms a round." in costs
    assert "1.10 times a round of AR" in costs
    assert "At 5 rows, a round of the tree takes +0.0 %" in costs
    words = speed_findings(replace(best, held_out_margin=float("nan"), simulated=True, interpolated=True))
    assert "measuring on that one" not in words
    assert "Simulated" in words
    assert "interpolated" in words


def test_live_decodes_are_counted_without_a_verdict(best):
    few = paired_findings(pd.Series([0.1, 0.2, -0.05]), best, ("chain", 4.0))
    assert f"Budget {best.budget} was faster than chain, length 4 on 2 of 3 prompts: +10 %, +20 %, −5.0 %." == few
    more = paired_findings(pd.Series([0.1, 0.2, -0.05, 0.3, 0.4]), best, ("ar", 0.0))
    assert "on 4 of 5 prompts: median +20 %, from −5.0 % to +40 %" in more


def test_text_is_large_enough_in_a_report_of_900_pixels(summary, cost, speed, best):
    figure = plot_budget_sweep(summary, cost.rows, speed, best, provenance={"gpu": "GPU X"})
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    shown = 900 / 96 / figure.get_figwidth()
    assert min(text.get_fontsize() for text in texts) * shown > 9.0


def test_an_empty_half_is_drawn_without_warnings(speed, recwarn):
    png_bytes(plot_speed(speed[speed["tok_s"].isna()]), 50)
    assert np.isnan(speed[speed["tok_s"].isna()]["round_ms"]).all()
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]
