"""Speeds are quotients of equal arms; the best budget is found, with its margin, on tables made by hand."""

import numpy as np
import pandas as pd
import pytest

from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study import (
    CostTable,
    best_budget,
    speed,
    summarize,
    sweep,
    sweep_adaptive_chains,
    sweep_ar,
    sweep_beam,
    sweep_chains,
)
from tests.study.fields import DIGESTS, draft_field

ARMS = [
    ("ar", 0, 1, 10.0),
    ("chain", 1, 2, 12.0),
    ("chain", 3, 4, 14.0),
    ("ddtree", 4, 5, 15.0),
    ("ddtree", 8, 9, 40.0),
]


def cost_rows(arms=ARMS, **columns) -> pd.DataFrame:
    """Measured rows of the given (method, setting, rows, median)."""
    return pd.DataFrame([
        {
            "method": method, "setting": setting, "rows": rows, "round_ms": ms, "round_ms_p10": ms - 1,
            "round_ms_p90": ms + 2, "context": 64, "streams": 1, "device": "cpu", "graph": "off",
        } | DIGESTS | columns
        for method, setting, rows, ms in arms
    ])  # fmt: skip


def sweeps(**options) -> pd.DataFrame:
    field = draft_field(seed=21, num_prompts=8, kinds=("code", "chat"), **options)
    tables = [sweep(field, [4, 6, 8]), sweep_ar(field), sweep_chains(field), sweep_adaptive_chains(field, [0.5])]
    return pd.concat([*tables, sweep_beam(field, [2])], ignore_index=True)


def arm(table: pd.DataFrame, method: str, setting: float) -> pd.Series:
    return table[(table["method"] == method) & (table["setting"] == setting)].iloc[0]


def test_speed_is_the_quotient_of_equal_arms_only():
    summary = summarize(sweeps(), num_resamples=10)
    table = speed(summary, CostTable(cost_rows()))
    tree = arm(table, "ddtree", 4)
    assert tree["tok_s"] == pytest.approx(1000 * tree["tokens_per_round"] / 15.0)
    assert tree["speedup"] == pytest.approx(tree["tokens_per_round"] * 10.0 / 15.0)
    assert (tree["round_ms_p10"], tree["round_ms_p90"], tree["cost_source"]) == (14.0, 17.0, "measured")
    assert arm(table, "ar", 0)["speedup"] == pytest.approx(1.0)
    for method, setting in (("ddtree", 6), ("chain", 2), ("adaptive_chain", 0.5), ("beam", 2)):
        missing = arm(table, method, setting)
        assert missing["cost_source"] == "none"
        assert np.isnan(missing["tok_s"])
        assert np.isnan(missing["speedup"])


def test_interpolated_times_are_marked_and_stay_inside_the_measured_range():
    table = speed(summarize(sweeps(), num_resamples=10), CostTable(cost_rows()), interpolate=True)
    assert arm(table, "ddtree", 6)["round_ms"] == pytest.approx(27.5)
    assert arm(table, "ddtree", 6)["cost_source"] == "interpolated"
    assert arm(table, "chain", 2)["round_ms"] == pytest.approx(13.0)
    assert arm(table, "ddtree", 4)["cost_source"] == "measured"
    few = CostTable(cost_rows([("ddtree", 8, 9, 40.0), ("ddtree", 16, 17, 80.0), ("chain", 3, 4, 14.0)]))
    table = speed(summarize(sweeps(), num_resamples=10), few, interpolate=True)
    assert arm(table, "ddtree", 6)["cost_source"] == "none"
    assert arm(table, "chain", 1)["round_ms"] == 14.0


def test_an_adaptive_chain_costs_what_its_rounds_cost():
    arms = [("chain", length, length + 1, 10.0 + length) for length in range(4)]
    summary = summarize(sweeps(), num_resamples=10)
    row = arm(speed(summary, CostTable(cost_rows(arms))), "adaptive_chain", 0.5)
    by_rows = arm(summary, "adaptive_chain", 0.5)["rounds_by_rows"]
    mean = sum(count * (9.0 + rows) for rows, count in by_rows.items()) / sum(by_rows.values())
    assert row["round_ms"] == pytest.approx(mean)
    assert row["cost_source"] == "measured"
    assert np.isnan(row["round_ms_p90"])


def test_speedups_by_kind_divide_by_the_ar_row_of_the_kind():
    summary = summarize(sweeps(), ("kind", "method", "setting"), num_resamples=10)
    table = speed(summary, CostTable(cost_rows(streams=4)))
    for kind, group in table.groupby("kind"):
        tree = arm(group, "ddtree", 4)
        assert tree["speedup"] == pytest.approx(tree["tok_s"] / arm(group, "ar", 0)["tok_s"]), kind
        assert tree["tok_s"] == pytest.approx(4 * tree["tok_s_per_stream"])
    alone = speed(summarize(sweeps(), num_resamples=10), CostTable(cost_rows(ARMS[1:])))
    assert alone["speedup"].isna().all()


@pytest.mark.parametrize("name", ["graph", "streams", "drafter_sha256", "prompt_set_digest", "template_hash",
                                  "concurrency", "device", "context"])  # fmt: skip
def test_costs_of_other_conditions_are_refused(name):
    rows = cost_rows(concurrency=1)
    rows[name] = rows[name].astype(object)
    rows.loc[2, name] = "other"
    with pytest.raises(ComparisonError, match=f"^{name}: "):
        CostTable(rows)


def test_halves_of_different_pairs_are_refused_or_marked():
    summary = summarize(sweeps(), num_resamples=10)
    other = CostTable(cost_rows(drafter_sha256="another"))
    with pytest.raises(ComparisonError, match="drafter_sha256"):
        speed(summary, other)
    assert speed(summary, other, mixed=True)["simulated"].all()
    assert not speed(summary, CostTable(cost_rows()))["simulated"].any()
    assert speed(summary, CostTable(cost_rows(simulated=True)))["simulated"].all()
    unknown = CostTable(cost_rows().drop(columns=list(DIGESTS)))
    assert not speed(summary, unknown)["simulated"].any()


def test_a_time_of_other_rows_is_refused():
    with pytest.raises(ComparisonError, match="rows"):
        speed(summarize(sweeps(), num_resamples=10), CostTable(cost_rows([("ddtree", 4, 8, 15.0)])))


@pytest.mark.parametrize(
    "rows",
    [
        cost_rows().drop(columns="round_ms_p90"),
        cost_rows().iloc[:0],
        cost_rows([*ARMS, ARMS[0]]),
        cost_rows([("ar", 0, 1, 0.0)]),
        cost_rows([("ar", 0, 1, np.nan)]),
    ],
    ids=["column", "empty", "twice", "zero", "nan"],
)
def test_malformed_cost_rows_are_refused(rows):
    with pytest.raises(ArgumentError):
        CostTable(rows)


def hand_made(lengths: dict[tuple[str, int, int], list[list[int]]]) -> pd.DataFrame:
    """Sweep rows of the given round lengths, a list a prompt, by (method, setting, rows)."""
    return pd.DataFrame([
        {"method": method, "setting": float(setting), "rows": rows, "prompt": index, "num_rounds": len(rounds),
         "round_lengths": rounds, "round_rows": [rows] * len(rounds), "simulated": False}
        for (method, setting, rows), prompts in lengths.items() for index, rounds in enumerate(prompts)
    ])  # fmt: skip


LENGTHS = {
    ("ar", 0, 1): [[1] * 12] * 6,
    ("chain", 1, 2): [[2] * 6] * 6,
    ("chain", 3, 4): [[2, 2, 2, 2, 2, 2]] * 3 + [[4, 4, 4]] * 3,
    ("ddtree", 4, 5): [[3] * 4] * 6,
    ("ddtree", 8, 9): [[4] * 3] * 6,
}


def test_the_best_budget_and_its_margin():
    best = best_budget(hand_made(LENGTHS), CostTable(cost_rows()), num_resamples=500)
    assert (best.budget, best.control_method, best.control_setting) == (4, "chain", 3.0)
    assert best.tok_s == pytest.approx(3000 / 15)
    chain_rate = 72 / (27 * 14.0)
    assert best.margin == pytest.approx(0.2 / chain_rate - 1)
    assert best.margin_over_ar == pytest.approx(1.0)
    assert best.margin_low < best.margin < best.margin_high
    assert best.selected_share == 1.0
    assert best.held_out_margin == pytest.approx(best.margin)
    assert (best.num_prompts, best.interpolated, best.simulated) == (6, False, False)


def test_the_control_is_chosen_anew_in_every_resample():
    """With the control held fixed, a resample without its good prompts would flatter the tree too much."""
    best = best_budget(hand_made(LENGTHS), CostTable(cost_rows()), num_resamples=500)
    worst_control = 2 / 12.0
    assert best.margin_high <= 0.2 / worst_control - 1 + 1e-9
    fixed = 0.2 / (12 / (6 * 14.0)) - 1
    assert fixed > best.margin_high


def test_the_held_out_margin_sees_through_a_lucky_budget():
    """Each budget is excellent on one prompt only: chosen on the others it never gets the prompt that made it win."""
    arms = {("ar", 0, 1): [[1] * 10] * 6}
    for lucky in range(6):
        arms["ddtree", lucky + 1, lucky + 2] = [[8] * 2 if index == lucky else [1] * 10 for index in range(6)]
    costs = [(method, setting, rows, 10.0) for method, setting, rows in arms]
    best = best_budget(hand_made(arms), CostTable(cost_rows(costs)), num_resamples=50)
    assert best.margin > 0.05
    assert best.held_out_margin == pytest.approx(0.0)


def test_few_prompts_give_no_interval_and_unmeasured_arms_take_no_part():
    few = hand_made({key: prompts[:4] for key, prompts in LENGTHS.items()})
    assert np.isnan(best_budget(few, CostTable(cost_rows())).margin_low)
    without = best_budget(hand_made(LENGTHS), CostTable(cost_rows([ARMS[0], ARMS[4]])), num_resamples=10)
    assert (without.budget, without.control_method) == (8, "ar")


def test_a_best_budget_needs_a_budget_a_control_and_equal_prompts():
    table = hand_made(LENGTHS)
    for kept, name in ((ARMS[:3], "a budget"), (ARMS[3:], "a control")):
        with pytest.raises(ArgumentError, match=name):
            best_budget(table, CostTable(cost_rows(kept)))
    with pytest.raises(ComparisonError, match="prompt"):
        best_budget(table.drop(index=0), CostTable(cost_rows()))
    with pytest.raises(ComparisonError, match="temperature"):
        best_budget(table.assign(temperature=np.arange(len(table)) % 2), CostTable(cost_rows()))


def test_sweeps_of_a_recording_feed_the_best_budget():
    best = best_budget(sweeps(), CostTable(cost_rows()), num_resamples=50, interpolate=True)
    assert best.budget in (4, 6, 8)
    assert best.margin_low <= best.margin_high
