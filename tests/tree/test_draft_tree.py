"""DraftTree's own operations: mask, root, one stream, prefix, device."""

import pytest
import torch

from kdlab.tree import DraftTree, build_best_first, check_tree
from tests.tree.samples import draft, paths, same, sample_tree


@pytest.mark.parametrize("budget", [0, 1, 30, 31, 32, 33, 63, 64, 100])
def test_ancestor_mask_is_that_of_the_parent_walk(budget):
    tree = build_best_first(*draft(2, 6, 40, seed=budget), budget)
    mask = tree.ancestor_mask()
    expected = torch.zeros_like(mask)
    for stream in range(2):
        for row in range(int(tree.num_nodes[stream])):
            node = row
            while node != -1:
                expected[stream, row, node] = True
                node = int(tree.parent[stream, node])
    assert mask.dtype == torch.bool
    assert torch.equal(mask, expected)
    assert tree.ancestors.dtype == torch.uint32
    assert tree.ancestors.shape == (2, budget + 1, (budget + 32) // 32)


def test_field_dtypes_and_shapes():
    tree = sample_tree(streams=3, depth=5, budget=33)
    for name in ("token", "parent", "depth", "rank", "first_child", "next_sibling"):
        assert getattr(tree, name).dtype == torch.int32
        assert getattr(tree, name).shape == (3, 34)
    assert tree.logp.dtype == tree.missed_mass.dtype == torch.float32
    assert tree.truncated.dtype == torch.bool
    assert tree.num_nodes.dtype == tree.nonfinite_rows.dtype == torch.int32
    assert (tree.num_streams, tree.capacity, tree.depth_limit) == (3, 34, 5)


def test_links_list_the_children_of_every_node():
    tree = sample_tree()
    for stream in range(2):
        parent = tree.parent[stream].tolist()
        for node in range(int(tree.num_nodes[stream])):
            listed, child = [], int(tree.first_child[stream, node])
            while child != -1:
                listed.append(child)
                child = int(tree.next_sibling[stream, child])
            assert listed == [row for row, up in enumerate(parent) if up == node]


def test_with_root_writes_only_the_root():
    tree = sample_tree()
    rooted = tree.with_root(torch.tensor([5, 0]))
    check_tree(rooted)
    assert rooted.token[:, 0].tolist() == [5, 0]
    assert tree.token[:, 0].tolist() == [0, 0]
    assert torch.equal(rooted.token[:, 1:], tree.token[:, 1:])
    with pytest.raises(ValueError, match="anchor"):
        tree.with_root(torch.tensor([5]))
    with pytest.raises(ValueError, match="anchor"):
        tree.with_root(torch.tensor([5.0, 1.0]))


def test_stream_is_trimmed_and_a_copy():
    log_probs, token_ids = draft(2, 3, 4)
    log_probs[1, 1] = float("nan")
    tree = build_best_first(log_probs, token_ids, 60)
    one = tree.stream(1)
    check_tree(one)
    assert one.capacity == int(tree.num_nodes[1]) == 5
    assert one.ancestors.shape == (1, 5, 1)
    assert paths(one) == paths(tree, 1)
    assert one.nonfinite_rows.tolist() == [1]
    before = one.token.clone()
    tree.token.fill_(99)
    tree.nonfinite_rows.fill_(99)
    assert torch.equal(one.token, before)
    assert one.nonfinite_rows.tolist() == [1]
    for index in (-1, 2, True):
        with pytest.raises(ValueError, match="index"):
            tree.stream(index)


@pytest.mark.parametrize("budget", [0, 1, 5, 19, 31, 32, 40])
def test_prefix_is_the_tree_of_the_smaller_budget(budget):
    log_probs, token_ids = draft(3, 5, 64)
    large = build_best_first(log_probs, token_ids, 40)
    assert same(large.prefix(budget), build_best_first(log_probs, token_ids, budget))
    check_tree(large.prefix(budget))


@pytest.mark.parametrize("budget", [-1, 21, True, 2.0])
def test_prefix_beyond_the_tree_is_refused(budget):
    with pytest.raises(ValueError, match="budget"):
        sample_tree(budget=20).prefix(budget)


def test_to_keeps_everything():
    tree = sample_tree()
    assert isinstance(tree.to("cpu"), DraftTree)
    assert same(tree.to("cpu"), tree)


@pytest.mark.gpu
def test_gpu_tree_equals_cpu_tree():
    log_probs, token_ids = draft(2, 7, 64)
    tree = build_best_first(log_probs.cuda(), token_ids.cuda(), 50)
    assert tree.token.is_cuda
    assert same(tree.to("cpu"), build_best_first(log_probs, token_ids, 50))
    assert same(tree.prefix(9).stream(1).to("cpu"), tree.to("cpu").prefix(9).stream(1))
    assert torch.equal(tree.ancestor_mask().cpu(), tree.to("cpu").ancestor_mask())
