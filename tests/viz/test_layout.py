"""The layout of trees: first child straight on, no two nodes on one spot, no recursion."""

import numpy as np

from kdlab.viz.layout import tidy_lines


def random_parents(rng, num_nodes):
    return [-1] + [int(rng.integers(0, row)) for row in range(1, num_nodes)]


def test_a_chain_is_one_line_and_a_star_one_line_a_leaf():
    assert tidy_lines([-1, 0, 1, 2], [0, 0, 0, 0]) == [0, 0, 0, 0]
    assert tidy_lines([-1, 0, 0, 0], [0, 3, 1, 2]) == [0, 2, 0, 1]


def test_no_two_nodes_share_a_spot_and_every_line_is_used():
    rng = np.random.default_rng(0)
    for num_nodes in (1, 2, 5, 17, 64):
        parents = random_parents(rng, num_nodes)
        depth = [0] * num_nodes
        for row in range(1, num_nodes):
            depth[row] = depth[parents[row]] + 1
        lines = tidy_lines(parents, rng.random(num_nodes).tolist())
        assert len(set(zip(depth, lines, strict=True))) == num_nodes
        assert set(lines) == set(range(max(lines) + 1))
        num_leaves = num_nodes - len(set(parents) - {-1})
        assert max(lines) + 1 == num_leaves


def test_branches_do_not_cross():
    rng = np.random.default_rng(1)
    parents = random_parents(rng, 40)
    lines = tidy_lines(parents, [0.0] * 40)
    below = [{row} for row in range(40)]
    for row in range(39, 0, -1):
        below[parents[row]] |= below[row]
    for family in below:
        used = sorted({lines[row] for row in family})
        assert used == list(range(used[0], used[-1] + 1))


def test_a_chain_of_4096_and_a_star_of_4096_need_no_recursion():
    assert max(tidy_lines([row - 1 for row in range(4097)], [0.0] * 4097)) == 0
    assert max(tidy_lines([-1] + [0] * 4096, [0.0] * 4097)) == 4095
