"""min_budget against trees enumerated in full, exact ties and tokens outside the top K among them."""

import dataclasses

import numpy as np
import pytest

from kdlab.decode.field import DraftField
from kdlab.errors import ArgumentError
from kdlab.study import min_budget
from kdlab.study.path_rank import best_first_trees, candidate_ranks, path_rows
from tests.study.fields import all_paths_in_order, draft_field

CASES = [
    {},
    {"ties": True},
    {"top_k": 3},
    {"top_k": 2, "ties": True},
    {"stop": True},
    {"depth_limit": 1, "vocab_size": 9},
    {"top_k": 1},
]


def oracle(field: DraftField, max_budget: int) -> list[np.ndarray]:
    """Number of the path in the full enumeration, 1 first."""
    result = []
    for prompt in field.prompts:
        needed = np.full(prompt.next_rank.shape, np.inf)
        for position in range(len(prompt.output_ids)):
            paths = all_paths_in_order(prompt.log_probs[position])
            order = {ranks: place for place, ranks in enumerate(paths, start=1)}
            for depth in range(1, field.depth_limit + 1):
                ranks = tuple(int(rank) for rank in prompt.next_rank[position, :depth])
                place = order.get(ranks, np.inf)
                needed[position, depth - 1] = place if place <= max_budget else np.inf
        result.append(needed)
    return result


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("max_budget", [0, 1, 5, 16, 17, 1024])
def test_min_budget_is_the_place_in_the_full_enumeration(options, max_budget):
    field = draft_field(seed=3, **options)
    for got, want in zip(min_budget(field, max_budget=max_budget), oracle(field, max_budget), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, want)


def test_ties_decide_some_of_the_places():
    """Without the tie rule the oracle would pass by luck: the tied field must hold paths of equal score."""
    field = draft_field(seed=3, ties=True)
    other_rule = oracle_with_reversed_ties(field)
    assert any((got != wrong).any() for got, wrong in zip(min_budget(field), other_rule, strict=True))


def oracle_with_reversed_ties(field: DraftField) -> list[np.ndarray]:
    """A broken twin: equal scores by the lexicographically larger ranks."""
    result = []
    for prompt in field.prompts:
        needed = np.zeros(prompt.next_rank.shape)
        for position in range(len(prompt.output_ids)):
            paths = all_paths_in_order(prompt.log_probs[position])
            score = {r: sum(float(prompt.log_probs[position, d, k]) for d, k in enumerate(r)) for r in paths}
            order = sorted(sorted(paths, reverse=True), key=lambda ranks: -score[ranks])
            for depth in range(field.depth_limit):
                needed[position, depth] = order.index(tuple(prompt.next_rank[position, : depth + 1])) + 1
        result.append(needed)
    return result


def test_rows_never_fall_with_depth_and_one_row_stands_for_each_position():
    field = draft_field(seed=5, stop=True)
    for needed, prompt in zip(min_budget(field), field.prompts, strict=True):
        assert needed.shape == (len(prompt.output_ids), field.depth_limit)
        assert (np.diff(np.nan_to_num(needed, posinf=1e9), axis=1) > 0)[np.isfinite(needed[:, 1:])].all()


@pytest.mark.parametrize("fault", ["nan_row", "nan_entry", "minus_inf"])
def test_unusable_draft_rows_end_the_tree(fault):
    field = draft_field(seed=6, num_prompts=1)
    prompt = field.prompts[0]
    log_probs = prompt.log_probs.copy()
    if fault == "minus_inf":
        log_probs[:, 1, 1:] = -np.inf
    else:
        log_probs[:, 1, (slice(None) if fault == "nan_row" else -1)] = np.nan
    broken = DraftField([dataclasses.replace(prompt, log_probs=log_probs)], field.top_k, 6, 3)
    needed, ranks = min_budget(broken)[0], candidate_ranks(broken.prompts[0])
    if fault == "minus_inf":
        assert (np.isfinite(needed[:, 1]) == (prompt.next_rank[:, 1] == 0)).all()
    else:
        assert np.isfinite(needed[:, 0]).all()
        assert np.isinf(needed[:, 1:]).all()
        assert (ranks[:, 1] == field.top_k).all()


def test_token_zero_is_not_taken_for_an_unused_row():
    field = draft_field(seed=7, num_prompts=1, vocab_size=2, positions=30)
    for got, want in zip(min_budget(field), oracle(field, 1024), strict=True):
        np.testing.assert_array_equal(got, want)


def test_path_rows_of_a_shifted_text_differ():
    """A broken twin: looking for the token after the next one must not give the same rows."""
    field = draft_field(seed=8, num_prompts=1)
    prompt = field.prompts[0]
    tree = best_first_trees(prompt, np.arange(len(prompt.output_ids)), 100, 6)
    right, shifted = path_rows(tree, prompt.next_ids), path_rows(tree, np.roll(prompt.next_ids, -1, axis=1))
    assert (right != shifted).any()


@pytest.mark.parametrize("max_budget", [-1, 1.0, True, "4"])
def test_max_budget_is_a_number_of_nodes(max_budget):
    with pytest.raises(ArgumentError, match="max_budget"):
        min_budget(draft_field(num_prompts=1), max_budget=max_budget)
