"""The budget sweep on axes: the numbers of the tables, flags said on the chart, sentences made from the numbers."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from kdlab import study
from kdlab.errors import ArgumentError
from kdlab.viz import (
    acceptance_findings,
    best_sentence,
    cost_findings,
    kind_findings,
    paired_findings,
    percent,
    plot_budget_sweep,
    plot_by_kind,
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
    assert legend(ax) == ["DDTree", "chain", "adaptive chain", "AR"]
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
    assert any("best budget" in text for text in legend(ax))
    assert any("interpolated" in text for text in legend(ax))
    assert ax.get_title(loc="left") == best_sentence(best)


def test_three_curves_stand_side_by_side(summary, cost, speed, best):
    figure = plot_budget_sweep(summary, cost.rows, speed, best, provenance={"gpu": "GPU X", "git_commit": "abc123"})
    assert len(figure.axes) == 3
    assert str(best.budget) in figure.get_suptitle()
    assert "GPU X" in figure.get_supxlabel()
    assert "abc123" in figure.get_supxlabel()
    axes = plot_budget_sweep(summary, cost.rows, speed, best).axes
    assert plot_budget_sweep(summary, cost.rows, speed, best, axes) is axes[0].figure


def test_kinds_have_a_line_each(table):
    ax = plot_by_kind(study.summarize(table, by=("method", "setting", "kind")), loops=["sums"])
    assert legend(ax) == ["prose (3 prompts)", "sums (3 prompts, a loop)"]


def test_the_sentence_says_what_the_interval_allows(best):
    gain = replace(best, margin=0.2, margin_low=0.1, margin_high=0.3)
    assert "a gain" in best_sentence(gain)
    assert "+20 %" in best_sentence(gain)
    unsettled = replace(best, margin=0.05, margin_low=-0.1, margin_high=0.2)
    assert "not settled" in best_sentence(unsettled)
    loss = replace(best, margin=-0.2, margin_low=-0.3, margin_high=-0.1)
    assert "a loss" in best_sentence(loss)
    assert "−20 % against" in best_sentence(loss)
    few = replace(best, margin_low=float("nan"), margin_high=float("nan"))
    assert "too few" in best_sentence(few)


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
    assert "At 5 rows the tree takes +0.0 %" in costs
    words = speed_findings(replace(best, held_out_margin=float("nan"), simulated=True, interpolated=True))
    assert "not known" in words
    assert "Simulated" in words
    assert "interpolated" in words


def test_kind_findings_say_where_trees_pass_the_best_chain():
    def row(kind, budget, gain, low):
        fixed = {"kind": kind, "num_prompts": 5, "chain": 7, "chain_tokens_per_round": 2.5, "tokens_per_round": 3.0}
        return fixed | {"budget": budget, "gain": gain, "gain_low": low, "gain_high": gain + 0.1}

    gains = pd.DataFrame([
        row("code", 64, 0.3, 0.2), row("code", 7, 0.05, -0.01), row("code", 15, 0.12, 0.01), row("math", 64, 0.0, -0.1),
        row("few", 64, 0.04, np.nan),
    ])  # fmt: skip
    texts = pd.DataFrame({"kind": ["code", "math", "few"], "repeated": [0.1, 0.45, 0.0], "loop": [False, True, False]})
    code, math, few = kind_findings(gains, texts).split("\n")
    assert "2.50 tokens per round (length 7)" in code
    assert "ahead from budget 15 on, +30 % (+20 % to +40 %) at 64" in code
    assert "loop" not in code
    assert "no tree is clearly ahead" in math
    assert "**A loop**: it repeats 45% of its 8-grams" in math
    assert few.endswith("ahead from budget 64 on, +4.0 % at 64.")


def test_live_decodes_may_contradict_the_quotient(best):
    margins = pd.Series([0.1, 0.2, -0.05])
    agrees = paired_findings(margins, replace(best, margin=0.1), ("chain", 4.0))
    assert "on 2 of 3 prompts" in agrees
    assert "same sign" in agrees
    assert "chain, length 4" in agrees
    assert "other sign" in paired_findings(margins, replace(best, margin=-0.1), ("ar", 0.0))


def test_an_empty_half_is_drawn_without_warnings(speed, recwarn):
    png_bytes(plot_speed(speed[speed["tok_s"].isna()]), 50)
    assert np.isnan(speed[speed["tok_s"].isna()]["round_ms"]).all()
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]
