"""Live rounds as a sweep's table: equal to the recording's, whole after any number of turns, stopped between rounds."""

import pandas as pd
import pytest

import kdlab
from kdlab.errors import ArgumentError, ComparisonError
from kdlab.model.prompts import PromptSet
from kdlab.paths import REPOSITORY
from kdlab.study import check_live, chosen_budgets, summarize, sweep, sweep_ar, sweep_chains, sweep_live, whole_groups
from kdlab.study.live import CHECK_COLUMNS
from kdlab.study.walk import COLUMNS
from tests.pairs import golden_prompts, tiny_pair

ARMS = [("ar", 0), ("chain", 3), ("ddtree", 7)]
SETTINGS = {"greedy": {"max_new_tokens": 12}, "sampled": {"max_new_tokens": 12, "temperature": 0.8, "seed": 5}}


def recorded(setting):
    field = kdlab.record(tiny_pair(), golden_prompts(), top_k=128, **SETTINGS[setting])
    return pd.concat([sweep(field, [6, 7]), sweep_chains(field, [3]), sweep_ar(field)], ignore_index=True)


def turns(setting="greedy", arms=ARMS, **options):
    live = sweep_live(tiny_pair(), golden_prompts(), arms, **SETTINGS[setting] | options)
    return [part for part in live if part is not None]


@pytest.mark.parametrize(("setting", "streams"), [("greedy", 1), ("greedy", 3), ("sampled", 2)])
def test_live_rounds_are_the_table_of_the_recording(setting, streams):
    predicted, live = recorded(setting), pd.concat(turns(setting, streams=streams), ignore_index=True)
    keys = ["method", "setting", "prompt"]
    wanted = predicted[predicted["setting"] != 6].sort_values(keys).drop(columns="top_k").reset_index(drop=True)
    pd.testing.assert_frame_equal(live.sort_values(keys).drop(columns="top_k").reset_index(drop=True), wanted)
    checks = check_live(live, predicted).set_index("method")
    assert (checks["equal_prompts"] == 4).all()
    assert (checks["num_rounds"] == checks["predicted_rounds"]).all()
    assert not checks["far"].any()
    wrong = predicted.replace({"setting": {6.0: 7.0, 7.0: 6.0}})  # a broken twin: the rounds of another budget
    assert check_live(live, wrong).set_index("method")["equal_prompts"]["ddtree"] < 4


def test_any_number_of_turns_compares_all_arms_on_the_same_golden_prompts():
    parts = turns(streams=3)
    assert [sorted(set(part["prompt"])) for part in parts] == [[0, 1, 2], [3]]
    assert list(parts[0].columns) == list(COLUMNS)
    for count, num_prompts in ((1, 3), (2, 4)):
        summary = summarize(pd.concat(parts[:count]), num_resamples=20)
        assert summary["num_prompts"].tolist() == [num_prompts] * 3
    assert [part["method"].iloc[0] for part in parts] == ["ar", "chain"]  # who begins changes


def test_it_can_be_left_between_any_two_rounds():
    live = sweep_live(tiny_pair(), golden_prompts(), [("ar", 0), ("ddtree", 3)], **SETTINGS["greedy"])
    seen = [next(live) for _ in range(6)]
    assert seen == [None] * 6
    live.close()
    with pytest.raises(StopIteration):
        next(live)


@pytest.mark.parametrize("arms", [[], [("ar", 0), ("ar", 0)], [("beam", 4)]], ids=str)
def test_wrong_arms_are_refused_before_anything_runs(arms):
    with pytest.raises(ArgumentError, match="arms"):
        sweep_live(tiny_pair(), golden_prompts(), arms)


def test_what_was_not_predicted_and_other_models_are_refused():
    predicted, (live, *_) = recorded("greedy"), turns(arms=[("ddtree", 7)])
    with pytest.raises(ArgumentError, match="ddtree 7 of prompt 0"):
        check_live(live, predicted[predicted["setting"] != 7])
    with pytest.raises(ComparisonError, match="drafter_sha256"):
        check_live(live.assign(drafter_sha256="other"), predicted)
    assert list(check_live(live.head(0), predicted).columns) == list(CHECK_COLUMNS)


def test_drafts_that_are_never_accepted_are_far_from_what_was_predicted():
    predicted, live = recorded("greedy"), pd.concat(turns(), ignore_index=True)
    plain = live.loc[live["method"] == "ar", ["prompt", "round_lengths"]].set_index("prompt")["round_lengths"]
    rejected = live["prompt"].map(plain).where(live["method"] == "chain", live["round_lengths"])
    checks = check_live(live.assign(round_lengths=rejected), predicted)
    assert checks.loc[checks["far"], "method"].tolist() == ["chain"]
    near = live.assign(round_lengths=[[*lengths[:-1], 1, 1] for lengths in live["round_lengths"]])
    near = check_live(near[near["method"] == "ar"], predicted)
    assert (near["equal_prompts"].tolist(), near["far"].tolist()) == ([0], [False])


def test_groups_are_whole_and_of_one_file():
    tiny, code = (kdlab.load_prompts(REPOSITORY / f"data/prompts/{name}.jsonl") for name in ("tiny", "code"))
    files = [PromptSet.of("a", tiny.prompts[:5]), PromptSet.of("b", code.prompts[:7])]
    assert len(whole_groups(files, 3)) == 6
    assert len(whole_groups(files, 3, 2)) == 8
    chosen = whole_groups(files, 100, 3)  # 3 of 5, 6 of 7
    assert list(chosen) == [*tiny.prompts[:3], *code.prompts[:6]]
    assert chosen.id == "a+b"
    for wrong in ({"count": 0}, {"streams": 0}, {"streams": 6}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            whole_groups(files, **{"count": 1} | wrong)


def test_a_budget_is_none_one_or_several():
    assert chosen_budgets(None, [7, 15]) == [7, 15]
    assert chosen_budgets(3, [7]) == [3]
    assert chosen_budgets([3, 1], [7]) == [3, 1]
    for wrong in ("7", [], [7, 7], 0, 7.5, True, 10**9):
        with pytest.raises(ArgumentError, match="budget"):
            chosen_budgets(wrong, [7])
