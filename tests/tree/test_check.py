"""check_tree: each promise of DraftTree, broken once, is reported with the stream and the node."""

from dataclasses import replace

import pytest
import torch

from kdlab.errors import TreeError
from kdlab.tree import DraftTree, build_best_first, check_tree
from tests.tree.samples import draft, sample_tree


def family():
    """Return two streams of 6 rows: 0 -> 1, 2; 1 -> 3, 4; and a last unused row."""
    row = ([9, 1, 2, 1, 2, -1], [-1, 0, 0, 1, 1, -1], [0.0, -1.0, -2.0, -3.0, -4.0, 0.0])
    return DraftTree.from_parents(*([part, part] for part in row))


BROKEN = {
    "parent cycle": ("parent", 3, 3, "node 3: .*cycle"),
    "parent two-cycle": ("parent", 1, 3, "node 1: .*cycle"),
    "parent out of range": ("parent", 4, 5, "node 4: .*out of range"),
    "second root": ("parent", 2, -1, "node 2: .*second root"),
    "no root": ("parent", 0, 1, "node 0: .*no root"),
    "parent after child": ("parent", 1, 2, "node 1: .*comes after"),
    "depth": ("depth", 3, 1, "node 3: depth 1, expected 2"),
    "twin tokens": ("token", 4, 1, "node 4: token 1 repeats.*node 3"),
    "negative token": ("token", 2, -1, "node 2: token -1"),
    "score above its parent": ("logp", 4, -0.5, "node 4: logp -0.5"),
    "root score": ("logp", 0, -0.5, "node 0: logp of the root"),
    "root rank": ("rank", 0, 1, "node 0: rank 1"),
    "link out of range": ("first_child", 2, 7, "node 2: first_child 7 is out of range"),
    "link to an unused row": ("next_sibling", 4, 5, "node 4: next_sibling 5 is out of range"),
    "diamond by first child": ("first_child", 2, 3, "node 3: is linked twice, from nodes 1 and 2"),
    "diamond by sibling": ("next_sibling", 2, 4, "node 4: is linked twice"),
    "lost child": ("first_child", 1, -1, "node 1: first_child -1, expected 3"),
    "lost sibling": ("next_sibling", 3, -1, "node 3: next_sibling -1, expected 4"),
    "unused token": ("token", 5, 0, "node 5: is unused.*token"),
    "unused link": ("first_child", 5, 2, "node 5: is unused.*first_child"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("stream", [0, 1])
def test_a_broken_promise_is_reported(case, stream):
    field, node, value, message = BROKEN[case]
    tree = family()
    check_tree(tree)
    changed = getattr(tree, field).clone()
    changed[stream, node] = value
    with pytest.raises(TreeError, match=f"stream {stream}, {message}"):
        check_tree(replace(tree, **{field: changed}))


@pytest.mark.parametrize(("node", "bits", "message"), [(3, 0b1001, "node 3"), (2, 0b111, "node 2"), (5, 1, "unused")])
def test_wrong_ancestor_bits_are_reported(node, bits, message):
    tree = family()
    words = tree.ancestors.view(torch.int32).clone()
    words[1, node, 0] = bits
    with pytest.raises(TreeError, match=f"stream 1, node {node}.*" if message.startswith("node") else message):
        check_tree(replace(tree, ancestors=words.view(torch.uint32)))


def test_sizes_and_dtypes_are_checked():
    tree = sample_tree()
    for count in (0, 22, -1):
        with pytest.raises(TreeError, match=rf"stream 1: num_nodes {count}"):
            check_tree(replace(tree, num_nodes=torch.tensor([21, count], dtype=torch.int32)))
    with pytest.raises(TreeError, match="depth: expected"):
        check_tree(replace(tree, depth=tree.depth.long()))
    with pytest.raises(TreeError, match="missed_mass: expected"):
        check_tree(replace(tree, missed_mass=tree.missed_mass[:, :1]))
    deepest = int(tree.depth.max())
    with pytest.raises(TreeError, match=f"above the depth limit {deepest - 1}"):
        check_tree(replace(tree, depth_limit=deepest - 1, missed_mass=tree.missed_mass[:, : deepest - 1]))


def test_two_siblings_that_point_at_each_other_end_with_an_error():
    tree = family()
    sibling = tree.next_sibling.clone()
    sibling[0, 4] = 3
    with pytest.raises(TreeError, match="stream 0, node 3: is linked twice"):
        check_tree(replace(tree, next_sibling=sibling))


def test_random_trees_pass():
    for seed in range(30):
        check_tree(build_best_first(*draft(3, 1 + seed % 7, 1 + seed % 11, seed=seed), seed * 3))
