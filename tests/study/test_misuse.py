"""What the study cannot answer is refused by name: no field, no prompt, sizes beyond memory, times that are none."""

import warnings

import pandas as pd
import pytest

from kdlab import study
from kdlab.decode.field import DraftField
from kdlab.errors import ArgumentError
from tests.study.fields import draft_field

FIELD = draft_field(num_prompts=2)
CALLS = {
    "sweep": lambda field: study.sweep(field, [1]),
    "sweep_ar": study.sweep_ar,
    "sweep_chains": study.sweep_chains,
    "sweep_adaptive_chains": study.sweep_adaptive_chains,
    "sweep_beam": lambda field: study.sweep_beam(field, [1]),
    "min_budget": study.min_budget,
    "acceptance_by_depth": lambda field: study.acceptance_by_depth(field, 1),
    "acceptance_by_rank": study.acceptance_by_rank,
    "calibration": study.calibration,
    "missed_mass": study.missed_mass,
}


@pytest.mark.parametrize("field", [None, "path", DraftField([], 6, 6, 3)], ids=["none", "path", "empty"])
@pytest.mark.parametrize("call", CALLS)
def test_no_field_and_no_prompt_are_refused(call, field):
    with pytest.raises(ArgumentError, match=r"^field: expected "):
        CALLS[call](field)


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("budgets", lambda: study.sweep(FIELD, [10**9])),
        ("max_budget", lambda: study.min_budget(FIELD, max_budget=10**9)),
        ("budget", lambda: study.acceptance_by_depth(FIELD, 10**9)),
        ("max_rank", lambda: study.acceptance_by_rank(FIELD, max_rank=10**9)),
        ("bins", lambda: study.calibration(FIELD, 10**9)),
        ("num_resamples", lambda: study.summarize(study.sweep(FIELD, [1]), num_resamples=10**9)),
        ("by", lambda: study.summarize(study.sweep(FIELD, [1]), by=None)),
        ("table", lambda: study.summarize(None)),
    ],
)
def test_sizes_beyond_memory_and_other_types_are_refused(named, call):
    with pytest.raises(ArgumentError, match=f"^{named}: expected "):
        call()


@pytest.mark.parametrize("prompts", [1, 2])
def test_the_largest_budget_needs_no_more_memory_than_one_tree(prompts):
    field = draft_field(num_prompts=prompts, positions=30, top_k=2)
    largest = study.min_budget(field, max_budget=16_384)
    assert [rows.tolist() for rows in largest] == [rows.tolist() for rows in study.min_budget(field)]


def cost(**changes):
    arm = dict(method="ddtree", setting=1.0, rows=2, round_ms=2.0, round_ms_p10=1.0, round_ms_p90=3.0)
    arm |= dict(context=1, streams=1, device="cpu")
    return study.CostTable(pd.DataFrame([arm | changes, arm | dict(method="ar", setting=0.0, rows=1)]))


@pytest.mark.parametrize("time", [0, -1.0, float("nan"), float("inf"), None, "fast"])
def test_times_that_are_none_are_refused(time):
    with pytest.raises(ArgumentError, match="cost rows: expected a finite round_ms above 0"):
        cost(round_ms=time)


def arms(field):
    return pd.concat([study.sweep(field, [1]), study.sweep_ar(field)])


def test_prompts_without_a_round_name_no_best_budget():
    with pytest.raises(ArgumentError, match="table: expected at least one round"):
        study.best_budget(arms(draft_field(num_prompts=1, positions=1, stop=True)), cost())


def test_a_prompt_without_a_round_stands_beside_others_without_a_warning():
    table = arms(draft_field(num_prompts=2))
    silent = table["prompt"] == 1
    table.loc[silent, "num_rounds"] = 0
    table.loc[silent, ["round_lengths", "round_rows"]] = [[[], []]] * int(silent.sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best = study.best_budget(table, cost())
    assert best.tok_s > 0
