"""Sweeps and controls against naive walks, one position at a time."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from kdlab.errors import ArgumentError
from kdlab.study import sweep, sweep_adaptive_chains, sweep_ar, sweep_beam, sweep_chains
from kdlab.study.walk import COLUMNS
from kdlab.tree import build_beam
from tests.study.fields import draft_field, oracle_accepted, oracle_rounds

CASES = [{}, {"ties": True}, {"top_k": 3}, {"stop": True}, {"stop": True, "positions": 1}, {"positions": 1}]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_sweep_equals_the_naive_walk(options):
    field = draft_field(seed=11, **options)
    budgets = [0, 1, 2, 3, 7, 31]
    table = sweep(field, budgets, truncated=True)
    assert len(table) == len(budgets) * len(field.prompts)
    for row in table.to_dict("records"):
        prompt = field.prompts[row["prompt"]]
        want = oracle_rounds(prompt, lambda p, prompt=prompt, row=row: oracle_accepted(prompt, p, row["budget"]))
        assert row["round_lengths"] == want
        assert row["num_rounds"] == len(want)
        assert row["rows"] == row["budget"] + 1
        if want:
            assert row["tokens_per_round"] == pytest.approx(np.mean(want))
        else:
            assert math.isnan(row["tokens_per_round"])


def test_a_walk_that_cuts_the_last_round_differs():
    """A broken twin: the output is cut at the end of the text, the last round's acceptance is not."""
    field = draft_field(seed=11, follow=1.0)
    lengths = sweep(field, [31], truncated=True)["round_lengths"]
    overrun = [sum(lengths[i]) - prompt.num_starts for i, prompt in enumerate(field.prompts)]
    assert max(overrun) > 0


def test_only_budgets_above_a_partial_top_k_are_marked():
    field = draft_field(top_k=3)
    table = sweep(field, [3, 4], truncated=True)
    assert table.groupby("budget")["truncated"].all().to_dict() == {3: False, 4: True}
    with pytest.raises(ArgumentError, match=r"field\.top_k: expected at least 4 for budget 4"):
        sweep(field, [3, 4])
    assert not sweep(draft_field(), [200])["truncated"].any()


@pytest.mark.parametrize("budgets", [[], [1, 1], [-1], [1.0], [True], ["1"], 4, [np.float64(2)]])
def test_wrong_budgets_are_refused(budgets):
    with pytest.raises(ArgumentError, match="budgets"):
        sweep(draft_field(), budgets)


def test_numpy_budgets_and_ranges_are_budgets():
    field = draft_field()
    pd.testing.assert_frame_equal(sweep(field, np.arange(3)), sweep(field, range(3)))


def naive_chain(prompt, position, length):
    text = np.concatenate([prompt.output_ids, prompt.tail_ids])
    accepted = 0
    while accepted < length and prompt.token_ids[position, accepted, 0] == text[position + 1 + accepted]:
        accepted += 1
    return accepted


@pytest.mark.parametrize("options", CASES, ids=str)
def test_chains_equal_the_naive_walk(options):
    field = draft_field(seed=12, **options)
    table = sweep_chains(field)
    assert sorted(set(table["setting"])) == [1, 2, 3]
    for row in table.to_dict("records"):
        prompt = field.prompts[row["prompt"]]
        want = oracle_rounds(prompt, lambda p, prompt=prompt, row=row: naive_chain(prompt, p, int(row["setting"])))
        assert row["round_lengths"] == want
        assert row["round_rows"] == [int(row["setting"]) + 1] * len(want)


def test_adaptive_chains_equal_the_naive_walk():
    field = draft_field(seed=13, stop=True)
    table = sweep_adaptive_chains(field, [0.0, 0.4, 0.8, 1.0])
    for row in table.to_dict("records"):
        prompt = field.prompts[row["prompt"]]
        drafted = []
        for position in range(len(prompt.output_ids)):
            length = 0
            while length < 3 and math.exp(prompt.log_probs[position, length, 0]) >= row["setting"]:
                length += 1
            drafted.append(length)
        want = oracle_rounds(prompt, lambda p, prompt=prompt, drafted=drafted: naive_chain(prompt, p, drafted[p]))
        starts = np.cumsum([0, *want])[:-1]
        assert row["round_lengths"] == want
        assert row["round_rows"] == [drafted[start] + 1 for start in starts]
        assert row["rows_per_round"] == pytest.approx(np.mean(row["round_rows"]))
        assert row["rows"] == 4


def test_an_adaptive_chain_that_is_never_cut_is_the_longest_chain():
    field = draft_field(seed=14)
    adaptive, longest = sweep_adaptive_chains(field, [0.0]), sweep_chains(field, [3])
    assert adaptive["round_lengths"].tolist() == longest["round_lengths"].tolist()


@pytest.mark.parametrize(("width", "budget"), [(1, None), (2, None), (4, 5), (6, 0)])
def test_beams_equal_a_walk_over_single_trees(width, budget):
    field = draft_field(seed=15)
    for row in sweep_beam(field, [width], budget).to_dict("records"):
        prompt = field.prompts[row["prompt"]]

        def accepted(position, prompt=prompt):
            rows = slice(position, position + 1)
            log_probs, token_ids = torch.from_numpy(prompt.log_probs[rows]), torch.from_numpy(prompt.token_ids[rows])
            tree = build_beam(log_probs, token_ids, width, budget)
            node, depth = 0, 0
            while depth < 3:
                children = (tree.parent[0] == node) & (tree.token[0] == int(prompt.next_ids[position, depth]))
                if not children.any():
                    break
                node, depth = int(children.nonzero()[0]), depth + 1
            return depth

        assert row["round_lengths"] == oracle_rounds(prompt, accepted)
        assert row["rows"] == row["budget"] + 1


def test_a_beam_of_one_is_the_longest_chain_and_ar_is_budget_zero():
    field = draft_field(seed=16)
    assert sweep_beam(field, [1])["round_lengths"].tolist() == sweep_chains(field, [3])["round_lengths"].tolist()
    plain, root = sweep_ar(field), sweep(field, [0])
    assert plain["round_lengths"].tolist() == root["round_lengths"].tolist()
    assert plain["method"].unique().tolist() == ["ar"]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda field: sweep_chains(field, [4]), "lengths"),
        (lambda field: sweep_chains(field, [0]), "lengths"),
        (lambda field: sweep_chains(field, [2, 2]), "lengths"),
        (lambda field: sweep_chains(field, []), "lengths"),
        (lambda field: sweep_adaptive_chains(field, [1.5]), "thresholds"),
        (lambda field: sweep_adaptive_chains(field, [math.nan]), "thresholds"),
        (lambda field: sweep_adaptive_chains(field, ["0.5"]), "thresholds"),
        (lambda field: sweep_adaptive_chains(field, [0.5, 0.5]), "thresholds"),
        (lambda field: sweep_adaptive_chains(field, []), "thresholds"),
        (lambda field: sweep_beam(field, [0]), "widths"),
        (lambda field: sweep_beam(draft_field(top_k=3), [4]), "widths"),
        (lambda field: sweep_beam(field, [2], -1), "budget"),
    ],
)
def test_wrong_settings_are_refused(call, name):
    with pytest.raises(ArgumentError, match=name):
        call(draft_field())


def test_all_sweeps_share_one_schema():
    field = draft_field(seed=17)
    chains = [sweep_ar(field), sweep_chains(field), sweep_adaptive_chains(field)]
    tables = [sweep(field, [0, 4]), sweep_beam(field, [2]), *chains]
    for table in tables:
        assert tuple(table.columns) == COLUMNS
    whole = pd.concat(tables, ignore_index=True)
    assert whole["setting"].dtype == np.float64
    assert whole["drafter_sha256"].unique().tolist() == ["d0"]
    assert not whole["simulated"].any()
    assert sweep_ar(draft_field(kinds=("random",)))["simulated"].all()
