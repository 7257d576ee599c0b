"""The phase table: a tree wins where its rows are cheap and loses where they are dear; calls lean against both."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from kdlab.errors import ArgumentError
from kdlab.study.phase import (
    BEST,
    COMPARISONS,
    COSTS,
    OPEN,
    PAYS,
    Rivals,
    RoundCost,
    arm_speeds,
    budget_table,
    phase_table,
    tree_gain,
)  # fmt: skip
from kdlab.study.recorded_rounds import read_rounds
from kdlab.study.step_fit import fit_rounds, floor_fit
from kdlab.study.walk import COLUMNS
from kdlab.study.workloads import Profile, Workload
from tests.study.k26 import DRAFTER, TARGET
from tests.study.rounds import round_rows

COST = RoundCost(fit_rounds(read_rounds(round_rows(), TARGET, DRAFTER)), TARGET, DRAFTER)
POINT = {"g": 0.8, "streams": 1, "context": 1024}
ARMS = {("ar", 0.0): (1.0, 1), ("chain", 3.0): (2.8, 4), ("chain", 7.0): (3.6, 8), ("ddtree", 7.0): (4.0, 8),
        ("ddtree", 31.0): (4.9, 32), ("adaptive_chain", 0.5): (3.0, 4), ("adaptive_tree", 0.1): (3.5, 5)}  # fmt: skip


def work(arms=None, prompts=6, spread=0.0, seed=0):
    """A workload whose arms yield the given tokens a round, prompts differing by `spread`."""
    draw, rows = np.random.default_rng(seed), []
    for (method, setting), (tokens, verified) in (ARMS if arms is None else arms).items():
        for prompt in range(prompts):
            total = round(100 * tokens * (1 + spread * draw.normal()))
            lengths = [total // 100 + (index < total % 100) for index in range(100)]
            known = {"round_lengths": lengths, "round_rows": [verified] * 100, "num_rounds": 100}
            rows.append(dict.fromkeys(COLUMNS) | known | {"method": method, "setting": setting, "prompt": prompt})
    return Workload(((Profile.of(pd.DataFrame(rows), "text"), 1.0),))


def test_speed_is_tokens_over_time_of_all_streams():
    one = arm_speeds(work(), COST, **POINT).set_index(["method", "setting"])
    us = COST.us(8, drafts=True, **POINT)
    assert one.loc[("ddtree", 7.0), "tok_s"] == pytest.approx(1e6 * 4.0 / us)
    assert one.loc[("ar", 0.0), "tok_s"] == pytest.approx(1e6 / COST.us(1, drafts=False, **POINT))
    many = POINT | {"streams": 8}
    eight = arm_speeds(work(), COST, **many).set_index(["method", "setting"])
    assert eight.loc[("ddtree", 7.0), "tok_s"] == pytest.approx(8e6 * 4.0 / COST.us(8, drafts=True, **many))
    assert (eight["tok_s"] > one["tok_s"]).all()


def test_rounds_beyond_the_fitted_ones_have_no_speed():
    crowd = {"g": 1.0, "streams": 32, "context": 1024}  # 32 rows of each: the largest fitted round has 260
    speeds, floors = (
        arm_speeds(work(), cost, **crowd).set_index(["method", "setting"])["tok_s"]
        for cost in (COST, RoundCost(floor_fit(TARGET, DRAFTER), TARGET, DRAFTER))
    )
    assert [arm for arm in ARMS if np.isnan(speeds[arm])] == [("ddtree", 31.0)]
    assert floors.notna().all()
    longer = POINT | {"context": 32768}
    assert arm_speeds(work(), COST, **longer)["tok_s"].isna().all()
    assert phase_table({"a": work()}, COST, g=(0.8,), streams=(1, 64), contexts=(8192, 32768), num_resamples=5)[
        ["streams", "context"]].drop_duplicates().values.tolist() == [[1, 8192]]  # fmt: skip
    table = budget_table(work(), COST, g=1.0, streams=(32,), contexts=(1024,)).set_index("arm")
    assert table["over_ar"].isna().tolist() == (table.index == "31").tolist()
    assert table.loc[table["best"]].index.tolist() == ["7"]


def test_ar_runs_no_drafter():
    assert COST.us(1, drafts=False, **POINT) < COST.us(1, drafts=True, **POINT)


def test_rows_of_a_tree_may_be_more_alike_than_those_of_a_chain():
    alike = RoundCost(COST.fit, TARGET, DRAFTER, trees_alike=0.1)
    plain, other = (arm_speeds(work(), cost, **POINT).set_index(["method", "setting"])["tok_s"]
                    for cost in (COST, alike))  # fmt: skip
    lower = arm_speeds(work(), COST, **POINT | {"g": 0.7}).set_index(["method", "setting"])["tok_s"]
    for arm in ARMS:
        is_tree = arm[0] in ("ddtree", "adaptive_tree")
        assert other[arm] == pytest.approx((lower if is_tree else plain)[arm])


def gain_of(rates, drawn, rivals=BEST, num_prompts=6, margin=0.0):
    arms = [("ar", 0.0), ("chain", 7.0), ("adaptive_chain", 0.5), ("ddtree", 7.0), ("ddtree", 31.0)]
    return tree_gain(arms, np.array(rates), np.array(drawn), rivals, num_prompts=num_prompts, margin=margin)


def test_gain_is_over_the_best_control_and_calls_need_the_whole_interval():
    rates = [100.0, 150.0, 120.0, 165.0, 90.0]
    sure = gain_of(rates, [rates] * 50)
    assert (sure["budget"], sure["control"], sure["gain"]) == (7.0, "chain", pytest.approx(0.1))
    assert (sure["call"], sure["over_ar"]) == (PAYS, pytest.approx(0.65))
    split = gain_of(rates, [rates] * 25 + [[100.0, 150.0, 120.0, 140.0, 90.0]] * 25)
    assert split["call"] == OPEN
    lost = [100.0, 150.0, 120.0, 140.0, 90.0]
    assert gain_of(lost, [lost] * 50)["call"] == COSTS
    assert gain_of(rates, [rates] * 50, margin=0.11)["call"] == OPEN
    assert gain_of(lost, [lost] * 50, margin=0.07)["call"] == OPEN
    few = gain_of(rates, [rates] * 50, num_prompts=4)
    assert few["call"] == OPEN
    assert np.isnan(few["low"])


def test_each_end_of_the_interval_lets_the_other_side_choose_anew():
    rates = [1.0, 150.0, 120.0, 165.0, 160.0]
    other_control = [1.0, 150.0, 170.0, 165.0, 160.0]
    assert gain_of(rates, [other_control] * 50)["low"] == pytest.approx(165 / 170 - 1)
    other_tree = [1.0, 150.0, 120.0, 140.0, 180.0]
    assert gain_of(rates, [other_tree] * 50)["high"] == pytest.approx(180 / 150 - 1)


def test_rivals_say_who_takes_part():
    rates = [100.0, 150.0, 160.0, 165.0, 90.0]
    fixed = gain_of(rates, [rates] * 50, Rivals(("ddtree",), ("ar", "chain")))
    assert (fixed["control"], gain_of(rates, [rates] * 50)["control"]) == ("chain", "adaptive_chain")
    with pytest.raises(ArgumentError, match="trees and controls"):
        gain_of(rates, [rates] * 50, Rivals(("beam",), ("ar",)))


def test_alike_routing_favours_larger_trees():
    table = phase_table({"text": work()}, COST, g=(0.0, 1.0), streams=(1,), contexts=(1024,))
    table = table[table["comparison"] == list(COMPARISONS)[1]].set_index("g")
    assert table.loc[0.0, "budget"] == 31
    assert table.loc[1.0, "budget"] == 7
    assert table.loc[0.0, "gain"] > table.loc[1.0, "gain"]


def test_the_grid_is_whole_and_a_fitted_machine_is_not_a_perfect_one():
    both = {"a": work(), 2.5: work(spread=0.05)}
    grid = {"g": (0.8, 1.0), "streams": (1, 8), "contexts": (1024,)}
    table = phase_table(both, COST, **grid, num_resamples=50)
    assert len(table) == 2 * 4 * len(COMPARISONS)
    assert table[["work", "g", "streams", "comparison"]].drop_duplicates().shape[0] == len(table)
    assert table.loc[table["work"] == "a", ["gain", "low", "high"]].std(axis=1).max() < 1e-9
    assert (table["low"] <= table["gain"] + 1e-12).all()
    assert (table["gain"] <= table["high"] + 1e-12).all()
    perfect = phase_table(both, RoundCost(floor_fit(TARGET, DRAFTER), TARGET, DRAFTER), **grid, num_resamples=50)
    assert (perfect["tok_s"] > table["tok_s"]).all()


def test_a_fit_that_is_off_leaves_more_open_and_moves_no_gain():
    off = RoundCost(replace(COST.fit, checked=(-0.2, 0.3, 0.25)), TARGET, DRAFTER)
    assert off.fit.error == pytest.approx(0.25)
    grid = {"g": (0.8,), "streams": (1, 8), "contexts": (1024,), "num_resamples": 50}
    sure, unsure = (phase_table({"a": work()}, cost, **grid) for cost in (COST, off))
    assert unsure["gain"].tolist() == sure["gain"].tolist()
    assert (unsure["call"] == OPEN).sum() > (sure["call"] == OPEN).sum()


def test_budgets_have_one_best_each_and_stand_beside_the_best_of_other_methods():
    table = budget_table(work(), COST, g=0.8, streams=(1, 8), contexts=(1024,))
    assert table.groupby("streams")["best"].sum().tolist() == [1, 1]
    one = table[table["streams"] == 1].set_index("arm")["over_ar"]
    speeds = arm_speeds(work(), COST, **POINT).set_index(["method", "setting"])["tok_s"]
    assert one["7"] == pytest.approx(speeds["ddtree", 7.0] / speeds["ar", 0.0])
    assert one["chain"] == pytest.approx(speeds["chain"].max() / speeds["ar", 0.0])
    assert {"adaptive chain", "adaptive tree"} < set(one.index)
    without = {arm: value for arm, value in ARMS.items() if arm[0] != "ar"}
    with pytest.raises(ArgumentError, match="AR and trees"):
        budget_table(work(without), COST, g=0.8, streams=(1,), contexts=(1024,))
