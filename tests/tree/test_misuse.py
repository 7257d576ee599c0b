"""Arguments that no caller should pass: each is refused at once, by name, and never read as something else."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kdlab.errors import KdlabError, TreeError
from kdlab.tree import (
    MAX_BUDGET,
    DraftTree,
    accept,
    build_beam,
    build_best_first,
    build_chain,
    check_tree,
)
from tests.tree.samples import draft, same

SMALL = DraftTree.from_parents([5, 6, 7, 8], [-1, 0, 0, 1])


@pytest.mark.parametrize("budget", [MAX_BUDGET + 1, 10**9, 2**31, 2**63, np.int64(2**62), torch.tensor([3, 4])])
@pytest.mark.parametrize("build", [build_best_first, build_chain, lambda lp, ids, n: build_beam(lp, ids, 2, n)])
def test_sizes_that_no_memory_holds_are_refused(build, budget):
    with pytest.raises(KdlabError, match=r"^(budget|length): "):
        build(*draft(1, 3, 4), budget)


def test_a_beam_without_a_budget_is_bounded_too():
    with pytest.raises(KdlabError, match="budget"):
        build_beam(*draft(1, 3, 4), MAX_BUDGET)


def test_a_beam_wider_than_its_budget_costs_no_more_than_the_budget():
    log_probs, token_ids = draft(1, 40, 8)
    assert same(build_beam(log_probs, token_ids, 10**12, 20), build_best_first(log_probs, token_ids, 20))


def test_a_rank_beyond_32_bits_is_refused_by_node():
    with pytest.raises(TreeError, match="node 1: rank 1099511627776"):
        DraftTree.from_parents([5, 6], [-1, 0], rank=[0, 2**40])


def test_sparse_candidates_are_refused():
    log_probs, token_ids = draft(1, 3, 4)
    with pytest.raises(KdlabError, match="log_probs: expected a dense tensor"):
        build_best_first(log_probs.to_sparse(), token_ids, 4)


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("token", lambda: DraftTree.from_parents(None, [-1])),
        ("token", lambda: DraftTree.from_parents("ab", [-1, 0])),
        ("token", lambda: DraftTree.from_parents([[1, 2], [3]], [[-1, 0], [-1]])),
        ("token", lambda: DraftTree.from_parents([0, 2**70], [-1, 0])),
        ("token", lambda: DraftTree.from_parents([0] * (MAX_BUDGET + 2), [-1, *range(MAX_BUDGET + 1)])),
        ("logp", lambda: DraftTree.from_parents([5, 6], [-1, 0], torch.tensor([0j, -1.0]))),
        ("logp", lambda: DraftTree.from_parents([5, 6], [-1, 0], ["a", "b"])),
        ("token", lambda: DraftTree.from_edges(5, [])),
        ("edges", lambda: DraftTree.from_edges([1, 2], None)),
        (r"edges\[0\]", lambda: DraftTree.from_edges([1, 2], [(0,)])),
        ("edges", lambda: DraftTree.from_edges([1, 2], [(0.0, 1.0)])),
        ("anchor", lambda: SMALL.with_root(torch.tensor([2**40 + 3]))),
        ("anchor", lambda: SMALL.with_root(torch.tensor([-1]))),
        ("anchor", lambda: SMALL.with_root(torch.tensor([1j]))),
        ("target_tokens", lambda: accept(SMALL, torch.full((1, 4), 2**40 + 6))),
        ("target_tokens", lambda: accept(SMALL, torch.zeros(1, 4, dtype=torch.complex64))),
        ("tree", lambda: accept(None, torch.zeros(1, 4, dtype=torch.int32))),
        ("tree", lambda: check_tree(None)),
        ("parent", lambda: check_tree(replace(SMALL, parent=SMALL.parent.tolist()))),
        ("missed_mass", lambda: check_tree(replace(SMALL, missed_mass=None))),
        ("depth_limit", lambda: check_tree(replace(SMALL, depth_limit=2.0))),
    ],
)
def test_malformed_arguments_are_named(named, call):
    with pytest.raises(KdlabError, match=f"^{named}: expected "):
        call()


def test_scores_beyond_float32_sink_to_minus_infinity_in_order():
    tree = DraftTree.from_parents([5, 6], [-1, 0], torch.tensor([0.0, -1e300], dtype=torch.float64))
    check_tree(tree)
    assert tree.logp.tolist() == [[0.0, float("-inf")]]


def test_the_walk_ends_with_the_rows_whatever_the_depth_limit():
    deep = replace(SMALL, depth_limit=10**6)
    assert accept(deep, torch.tensor([[6, 8, 0, 0]])).length.tolist() == [2]
