"""The phase table: a tree wins where its rows are cheap and loses where they are dear."""

import pandas as pd
import pytest

from kdlab.errors import ArgumentError
from kdlab.study.phase import RoundCost, arm_speeds, phase_table, tree_gain
from kdlab.study.step_cost import Step, round_stages
from kdlab.study.step_fit import StageFit
from tests.study.k26 import DRAFTER, TARGET

STAGES = round_stages(TARGET, DRAFTER, Step(8, 60.0, ranks=8))
COST = RoundCost({stage.name: StageFit(1.2, 1.5, (0.0,)) for stage in STAGES}, TARGET, DRAFTER)
ARMS = (("ar", 0, 1.0, 1), ("chain", 3, 2.8, 4), ("chain", 7, 3.6, 8), ("ddtree", 7, 4.0, 8), ("ddtree", 31, 4.9, 32))


def profile(*arms):
    rows = [(method, setting, tokens, {rows: 10}) for method, setting, tokens, rows in arms]
    return pd.DataFrame(rows, columns=["method", "setting", "tokens_per_round", "rounds_by_rows"])


POINT = {"g": 0.8, "streams": 1, "context": 1024}


def test_speed_is_tokens_over_time_of_all_streams():
    one = arm_speeds(profile(*ARMS), COST, **POINT)
    assert one["tok_s"].tolist() == pytest.approx((1e6 * one["tokens_per_round"] / one["round_us"]).tolist())
    eight = arm_speeds(profile(*ARMS), COST, g=0.8, streams=8, context=1024)
    assert (eight["round_us"] > one["round_us"]).all()
    assert (eight["tok_s"] > one["tok_s"]).all()


def test_rounds_of_different_rows_cost_their_mean():
    mixed = profile(("adaptive_chain", 0.1, 3.0, 2))
    mixed.at[0, "rounds_by_rows"] = {2: 30, 8: 10}
    found = arm_speeds(mixed, COST, **POINT)["round_us"][0]
    two, eight = (COST.us(rows, drafts=True, **POINT) for rows in (2, 8))
    assert found == pytest.approx(0.75 * two + 0.25 * eight)


def test_ar_runs_no_drafter():
    assert COST.us(1, drafts=False, **POINT) < COST.us(1, drafts=True, **POINT)


def test_gain_is_over_the_best_control():
    speeds = pd.DataFrame(
        [("ar", 0, 100.0), ("chain", 7, 150.0), ("ddtree", 7, 165.0), ("ddtree", 31, 90.0)],
        columns=["method", "setting", "tok_s"],
    )
    found = tree_gain(speeds)
    assert (found["budget"], found["control"], found["gain"]) == (7.0, "chain", pytest.approx(0.1))
    with pytest.raises(ArgumentError, match="trees and controls"):
        tree_gain(speeds[speeds["method"] == "ddtree"])


def test_alike_routing_favours_larger_trees():
    table = phase_table({"text": profile(*ARMS)}, COST, g=(0.0, 1.0), streams=(1,), contexts=(1024,)).set_index("g")
    assert table.loc[0.0, "budget"] == 31
    assert table.loc[1.0, "budget"] == 7
    assert table.loc[0.0, "gain"] > table.loc[1.0, "gain"]


def test_the_grid_is_whole():
    both = {"a": profile(*ARMS), "b": profile(*ARMS)}
    table = phase_table(both, COST, g=(0.8, 1.0), streams=(1, 8), contexts=(1024,))
    assert len(table) == 8
    assert table[["profile", "g", "streams"]].drop_duplicates().shape[0] == 8


def test_missing_columns_are_named():
    with pytest.raises(ArgumentError, match="rounds_by_rows"):
        arm_speeds(profile(*ARMS).drop(columns="rounds_by_rows"), COST, **POINT)
