"""Chain, beam and the root alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdlab.tree import build_beam, build_best_first, build_chain, build_root_only, check_tree
from tests.tree.samples import draft, paths, rows, same


@pytest.mark.parametrize("length", [0, 1, 3, 6, 9])
def test_chain_is_the_best_candidate_of_every_depth(length):
    log_probs, token_ids = draft(2, 6, 8, seed=1)
    tree = build_chain(log_probs, token_ids, length)
    check_tree(tree)
    kept = min(length, 6)
    assert tree.capacity == length + 1
    assert tree.num_nodes.tolist() == [kept + 1] * 2
    assert torch.equal(tree.token[:, 1 : kept + 1].long(), token_ids[:, :kept, 0])
    assert torch.allclose(tree.logp[:, 1 : kept + 1], log_probs[:, :kept, 0].cumsum(1))
    assert tree.depth_limit == 6
    assert not tree.truncated.any()


def test_chain_ends_above_a_broken_row():
    log_probs, token_ids = draft(2, 6, 8, seed=1)
    log_probs[1, 3, 5] = float("nan")
    tree = build_chain(log_probs, token_ids, 6)
    assert tree.num_nodes.tolist() == [7, 4]
    assert tree.nonfinite_rows.tolist() == [0, 1]


@pytest.mark.parametrize("length", [-1, True, 2.0])
def test_chain_lengths_that_are_no_count_are_refused(length):
    with pytest.raises(ValueError, match="length"):
        build_chain(*draft(1, 2, 2), length)


@given(st.integers(0, 10_000), st.integers(0, 40), st.integers(0, 10), st.sampled_from([None, 1, 4]))
@settings(max_examples=100)
def test_a_beam_as_wide_as_the_budget_is_the_best_first_tree(seed, budget, extra, levels):
    log_probs, token_ids = draft(2, 5, 9, seed=seed, levels=levels)
    beam = build_beam(log_probs, token_ids, max(1, budget + extra), budget)
    assert same(beam, build_best_first(log_probs, token_ids, budget))


def naive_beam(log_probs, width, budget):
    beam, kept = [(0.0, ())], []
    for row in log_probs.double().tolist():
        children = [(score - value, (*ranks, rank)) for score, ranks in beam for rank, value in enumerate(row)]
        beam = sorted(children)[:width]
        kept += beam
    return [ranks for _, ranks in sorted(kept)[:budget]]


@pytest.mark.parametrize("width", [1, 2, 3, 7])
@pytest.mark.parametrize("budget", [0, 1, 5, 11, None])
@pytest.mark.parametrize("levels", [None, 2])
def test_beam_keeps_the_best_children_of_every_depth(width, budget, levels):
    log_probs, token_ids = draft(1, 5, 6, seed=7, levels=levels)
    tree = build_beam(log_probs, token_ids, width, budget)
    check_tree(tree)
    budget = width * 5 if budget is None else budget
    assert tree.capacity == budget + 1
    assert paths(tree, field="rank")[1:] == naive_beam(log_probs[0], width, budget)


def test_beam_of_width_one_is_the_chain():
    log_probs, token_ids = draft(2, 5, 6)
    assert same(build_beam(log_probs, token_ids, 1), build_chain(log_probs, token_ids, 5))


def test_beam_is_truncated_where_it_lacks_candidates():
    log_probs, token_ids = draft(1, 3, 4)
    assert build_beam(log_probs, token_ids, 5).truncated.all()
    assert not build_beam(log_probs, token_ids, 4).truncated.any()
    assert not build_beam(log_probs, token_ids, 5, 4).truncated.any()
    whole = draft(1, 3, 4, vocab=4)
    assert not build_beam(*whole, 5).truncated.any()


def test_beam_handles_missing_and_broken_rows():
    inf = float("inf")
    tree = build_beam(*rows([[-1.0, -inf], [-0.5, -0.7], [float("nan"), -1.0]]), 3)
    check_tree(tree)
    assert paths(tree)[1:] == [(10,), (10, 10), (10, 11)]
    assert build_beam(torch.zeros(1, 0, 3), torch.zeros(1, 0, 3, dtype=torch.int64), 3).capacity == 1


@pytest.mark.parametrize(
    ("width", "budget", "named"), [(0, 4, "width"), (True, 4, "width"), (2, -1, "budget"), (2, 1.5, "budget")]
)
def test_beam_sizes_that_are_no_count_are_refused(width, budget, named):
    with pytest.raises(ValueError, match=named):
        build_beam(*draft(1, 2, 2), width, budget)


def test_root_only():
    tree = build_root_only(3)
    check_tree(tree)
    assert tree.capacity == 1
    assert tree.depth_limit == 0
    assert tree.missed_mass.shape == (3, 0)
    assert tree.ancestor_mask().all()
    with pytest.raises(ValueError, match="num_streams"):
        build_root_only(-1)
