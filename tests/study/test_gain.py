"""Repetition of recorded text, and the gain of trees over the best chain, against numbers worked out by hand."""

import numpy as np
import pandas as pd
import pytest

from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study import gain_by_kind, repeated_share, repetition, sweep, sweep_chains, without_loops
from tests.study.fields import draft_field


def sweeps(field, budgets):
    return pd.concat([sweep(field, budgets), sweep_chains(field)], ignore_index=True)


def test_a_run_of_eight_counts_when_the_same_output_held_it():
    once = list(range(20))
    assert repeated_share([once, once]) == 0.0
    assert repeated_share([once[:10] + once[:10]]) == pytest.approx(3 / 13)
    assert repeated_share([[7] * 20]) == pytest.approx(12 / 13)
    assert np.isnan(repeated_share([[1, 2, 3], []]))


def test_repetition_has_a_row_a_kind_and_names_loops():
    field = draft_field(1, 4, kinds=("prose", "loop"), positions=30, stop=True)
    for prompt in field.prompts[1::2]:
        prompt.output_ids[:] = 3
    found = repetition(field).set_index("kind")
    assert list(found.index) == ["prose", "loop"]
    assert found["loop"].tolist() == [False, True]
    assert found["num_tokens"].tolist() == [60, 60]
    assert found["stopped"].tolist() == [1.0, 1.0]
    table = sweep(field, [2])
    assert set(without_loops(table, ["loop"])["kind"]) == {"prose"}
    assert without_loops(table, []).equals(table)
    with pytest.raises(ArgumentError, match="loop, prose"):
        without_loops(table, ["prose", "loop"])


def test_the_gain_is_over_the_best_chain_of_the_kind():
    field = draft_field(2, 12, kinds=("code", "math"), positions=60)
    found = gain_by_kind(sweeps(field, [1, 3, 8]), [3, 8])
    assert found[["kind", "budget"]].values.tolist() == [["code", 3], ["code", 8], ["math", 3], ["math", 8]]
    for row in found.to_dict("records"):
        tables = (sweep(field, [row["budget"]]), sweep_chains(field))
        tree, chains = (table[table["kind"] == row["kind"]] for table in tables)
        by_length = {
            length: sum(map(sum, group["round_lengths"])) / group["num_rounds"].sum()
            for length, group in chains.groupby("setting")
        }
        assert row["chain_tokens_per_round"] == pytest.approx(max(by_length.values()))
        assert by_length[row["chain"]] == row["chain_tokens_per_round"]
        mean = sum(map(sum, tree["round_lengths"])) / tree["num_rounds"].sum()
        assert row["tokens_per_round"] == pytest.approx(mean)
        assert row["gain"] == pytest.approx(mean / max(by_length.values()) - 1)
        assert row["gain_low"] <= row["gain"] <= row["gain_high"] + 1e-9


def test_few_prompts_have_a_gain_and_no_interval():
    found = gain_by_kind(sweeps(draft_field(3, 4), [3]), [3])
    assert np.isnan(found["gain_low"]).all()
    assert np.isfinite(found["gain"]).all()


def test_what_is_missing_or_mixed_is_refused():
    field = draft_field(4, 5)
    with pytest.raises(ArgumentError, match="9"):
        gain_by_kind(sweeps(field, [3]), [3, 9])
    with pytest.raises(ArgumentError, match="chains"):
        gain_by_kind(sweep(field, [3]), [3])
    table = sweeps(field, [3])
    table.loc[0, "target_sha256"] = "another"
    with pytest.raises(ComparisonError):
        gain_by_kind(table, [3])
