"""Imported trees: what a token and a parent a row describe, and the malformed ones that are refused by name."""

import pytest
import torch

from kdlab.errors import TreeError
from kdlab.tree import DraftTree, check_tree
from tests.tree.samples import paths, same, sample_tree


def test_parents_round_trip_a_batch():
    tree = sample_tree(streams=3, depth=5, budget=40)
    again = DraftTree.from_parents(tree.token, tree.parent, tree.logp, tree.rank)
    check_tree(again)
    for name in ("token", "parent", "depth", "logp", "rank", "num_nodes", "first_child", "next_sibling"):
        assert torch.equal(getattr(again, name), getattr(tree, name))
    assert torch.equal(again.ancestor_mask(), tree.ancestor_mask())


def test_one_stream_without_scores():
    tree = DraftTree.from_parents([9, 0, 3, 0, 5], [-1, 0, 0, 2, 2])
    check_tree(tree)
    assert tree.depth[0].tolist() == [0, 1, 1, 2, 2]
    assert tree.depth_limit == 2
    assert tree.rank[0].tolist() == [0, 0, 1, 0, 1]
    assert tree.logp[0].tolist() == [0.0] * 5
    assert tree.first_child[0].tolist() == [1, -1, 3, -1, -1]
    assert tree.next_sibling[0].tolist() == [-1, 2, -1, 4, -1]


def test_edges_give_the_same_tree():
    edges = [(2, 4), (0, 1), (0, 2), (2, 3)]
    tree = DraftTree.from_edges([9, 0, 3, 0, 5], edges, logp=[0.0, -1.0, -2.0, -2.5, -3.0])
    assert same(tree, DraftTree.from_parents([9, 0, 3, 0, 5], [-1, 0, 0, 2, 2], [0.0, -1.0, -2.0, -2.5, -3.0]))


def test_unused_rows_at_the_end_are_recognised():
    tree = DraftTree.from_parents([[1, 2, 3], [4, -1, -1]], [[-1, 0, 1], [-1, -1, -1]])
    check_tree(tree)
    assert tree.num_nodes.tolist() == [3, 1]


BAD_PARENTS = {
    "own parent": ([-1, 0, 2], 2, "cycle"),
    "two-cycle": ([-1, 2, 1], 1, "cycle"),
    "long cycle": ([-1, 0, *range(3, 20), 2], 2, "cycle of 18"),
    "two roots": ([-1, 0, -1, 2], 2, "second root"),
    "root not first": ([1, -1, 1], 1, "root must be row 0"),
    "no root": ([1, 0, 0], 0, "no root"),
    "lone self loop": ([0], 0, "no root"),
    "too large": ([-1, 0, 3], 2, "out of range"),
    "too small": ([-1, 0, -2], 2, "out of range"),
    "late parent": ([-1, 2, 0], 1, "comes after"),
}


@pytest.mark.parametrize("case", BAD_PARENTS)
@pytest.mark.parametrize("stream", [0, 1])
def test_malformed_parents_are_refused_by_stream_and_node(case, stream):
    parent, node, message = BAD_PARENTS[case]
    size = len(parent)
    good = [-1, *range(size - 1)]
    parents = [good, good]
    parents[stream] = parent
    with pytest.raises(TreeError, match=rf"stream {stream}, node {node}: .*{message}"):
        DraftTree.from_parents([list(range(size))] * 2, parents)


def test_a_late_parent_is_not_called_a_cycle():
    with pytest.raises(TreeError) as caught:
        DraftTree.from_parents([0, 1, 2], [-1, 2, 0])
    assert "cycle" not in str(caught.value)


BAD_EDGES = {
    "diamond": ([(0, 1), (0, 2), (1, 3), (2, 3)], 3, "two parents, 1 and 2"),
    "linked twice": ([(0, 1), (1, 2), (1, 2), (0, 3)], 2, "linked twice"),
    "cycle": ([(0, 1), (3, 2), (2, 3)], 2, "cycle"),
    "two roots": ([(0, 1), (2, 3)], 2, "second root"),
    "no root": ([(0, 1), (1, 2), (2, 3), (3, 0)], 0, "no root"),
    "child out of range": ([(0, 4)], 4, "out of range"),
    "parent out of range": ([(-1, 2)], -1, "out of range"),
}


@pytest.mark.parametrize("case", BAD_EDGES)
def test_malformed_edges_are_refused_by_node(case):
    edges, node, message = BAD_EDGES[case]
    with pytest.raises(TreeError, match=rf"stream 0, node {node}: .*{message}"):
        DraftTree.from_edges([0, 1, 2, 3], edges)


def test_malformed_values_are_refused_by_node():
    with pytest.raises(TreeError, match="node 2: token 7 repeats that of its sibling, node 1"):
        DraftTree.from_parents([0, 7, 7], [-1, 0, 0])
    with pytest.raises(TreeError, match="node 1: token -3"):
        DraftTree.from_parents([0, -3, 7], [-1, 0, 0])
    with pytest.raises(TreeError, match="node 1: token 2147483648"):
        DraftTree.from_parents([0, 2**31, 7], [-1, 0, 0])
    with pytest.raises(TreeError, match=r"node 2: logp -0\.5 is above"):
        DraftTree.from_parents([0, 1, 2], [-1, 0, 1], [0.0, -1.0, -0.5])
    with pytest.raises(TreeError, match="node 2: logp nan"):
        DraftTree.from_parents([0, 1, 2], [-1, 0, 1], [0.0, -1.0, float("nan")])
    with pytest.raises(TreeError, match="node 0: logp of the root"):
        DraftTree.from_parents([0, 1], [-1, 0], [-1.0, -1.0])
    with pytest.raises(TreeError, match="node 1: rank -1"):
        DraftTree.from_parents([0, 1], [-1, 0], rank=[0, -1])


@pytest.mark.parametrize(
    ("token", "parent", "named"),
    [([], [], "token"), ([0, 1], [-1], "parent"), ([0.5, 1.0], [-1, 0], "token"), ([0, 1], [-1.0, 0.0], "parent")],
)
def test_malformed_arrays_are_refused(token, parent, named):
    with pytest.raises(ValueError, match=named):
        DraftTree.from_parents(token, parent)


def test_optional_arrays_may_hold_zeros_or_one_element():
    assert DraftTree.from_parents([5], [-1], [0.0], [0]).num_nodes.tolist() == [1]
    tree = DraftTree.from_parents([5, 1, 2], [-1, 0, 0], torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    assert tree.rank.tolist() == [[0, 0, 0]]


def test_long_chain_wide_family_and_long_cycle_need_no_recursion():
    size = 4097
    chain = DraftTree.from_parents([0] * size, [-1, *range(size - 1)])
    check_tree(chain)
    assert chain.depth_limit == 4096
    family = DraftTree.from_parents(list(range(size)), [-1] + [0] * (size - 1))
    check_tree(family)
    with pytest.raises(TreeError, match="cycle of 4095"):
        DraftTree.from_parents([0] * size, [-1, 0, *range(3, size), 2])
    assert len(paths(chain)[-1]) == 4096
