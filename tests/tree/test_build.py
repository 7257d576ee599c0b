"""The best-first builder: order, tie rule, nesting and every edge of its inputs."""

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdlab.tree import build_best_first, build_chain, check_tree
from tests.tree.samples import draft, enumerate_all, paths, rows, same

# Quarter steps of nats: sums are exact in binary, so equal scores are exactly equal and ties are everywhere.
STEPS = st.integers(0, 8).map(lambda step: -step / 4)


@st.composite
def tied_drafts(draw, max_depth=4, max_width=4):
    depth, width = draw(st.integers(1, max_depth)), draw(st.integers(1, max_width))
    values = [draw(st.lists(STEPS, min_size=width, max_size=width)) for _ in range(depth)]
    ids = [draw(st.permutations(range(width + 2)))[:width] for _ in range(depth)]
    return rows(values, ids)


def sort_rows(log_probs, token_ids):
    order = (-log_probs).sort(dim=-1, stable=True).indices
    return log_probs.gather(-1, order), token_ids.gather(-1, order)


@given(tied_drafts(), st.integers(0, 60))
@settings(max_examples=200)
def test_order_and_ties_are_those_of_full_enumeration(candidates, budget):
    tree = build_best_first(*candidates, budget)
    check_tree(tree)
    best = enumerate_all(sort_rows(*candidates)[0][0], budget)
    assert paths(tree, field="rank")[1:] == [ranks for _, ranks in best]
    assert tree.logp[0, 1 : len(best) + 1].tolist() == [score for score, _ in best]


@given(tied_drafts(), st.integers(0, 60))
@settings(max_examples=100)
def test_tokens_are_those_of_the_ranks(candidates, budget):
    tree = build_best_first(*candidates, budget)
    ids = sort_rows(*candidates)[1][0].tolist()
    for tokens, ranks in zip(paths(tree), paths(tree, field="rank"), strict=True):
        assert tokens == tuple(ids[depth][rank] for depth, rank in enumerate(ranks))


@given(tied_drafts(), st.integers(0, 40), st.integers(0, 40))
@settings(max_examples=100)
def test_trees_are_prefix_closed_and_nested(candidates, first, second):
    small, large = sorted((first, second))
    nodes = paths(build_best_first(*candidates, large))
    assert all(path[:-1] in nodes[:row] for row, path in enumerate(nodes) if row)
    assert len(set(nodes)) == len(nodes)
    cut, smaller = build_best_first(*candidates, large).prefix(small), build_best_first(*candidates, small)
    assert same(cut, smaller, apart_from=["truncated"])


@given(st.integers(0, 10_000), st.integers(1, 40))
@settings(max_examples=50)
def test_order_of_the_candidates_does_not_matter_without_ties(seed, budget):
    log_probs, token_ids = draft(1, 5, 12, seed=seed)
    shuffle = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    shuffled = build_best_first(log_probs[..., shuffle], token_ids[..., shuffle], budget)
    assert same(shuffled, build_best_first(log_probs, token_ids, budget))


def test_equal_candidates_keep_the_given_order():
    tree = build_best_first(*rows([[-1.0, -0.5, -1.0, -0.5]], [[7, 3, 5, 9]]), 4)
    assert tree.token[0].tolist() == [0, 3, 9, 7, 5]
    assert tree.rank[0].tolist() == [0, 0, 1, 2, 3]


def test_equal_scores_go_by_the_smaller_rank_tuple():
    tree = build_best_first(*rows([[0.0, 0.0], [0.0, 0.0]]), 6)
    assert paths(tree, field="rank")[1:] == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


def test_scores_are_summed_in_float64():
    # In float32 -16 - 1e-7 is -16: the child would tie with its uncle and win by rank.
    tree = build_best_first(*rows([[-16.0, -16.0], [-1e-7, -30.0]]), 3)
    assert paths(tree, field="rank")[1:] == [(0,), (1,), (0, 0)]


def test_improbable_deep_paths_keep_their_order():
    log_probs, token_ids = draft(1, 12, 4, seed=5)
    log_probs = log_probs - log_probs[..., :1] + math.log(1e-4)
    deep = build_best_first(log_probs, token_ids, 300)
    scores = deep.logp[0].double()
    table, ranks = log_probs[0].double(), paths(deep, field="rank")
    exact = [sum(float(table[d, r]) for d, r in enumerate(path)) for path in ranks]
    assert exact == sorted(exact, reverse=True)
    assert torch.allclose(scores, torch.tensor(exact, dtype=torch.float64), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_and_int_dtype(dtype):
    log_probs, token_ids = draft(2, 4, 8)
    log_probs = log_probs.to(dtype)
    tree = build_best_first(log_probs, token_ids.to(torch.int32), 12)
    assert same(tree, build_best_first(log_probs.double(), token_ids, 12))


def test_streams_do_not_touch_each_other():
    log_probs, token_ids = draft(5, 6, 16, seed=3)
    log_probs[2, 1, 4] = float("nan")
    batch = build_best_first(log_probs, token_ids, 25)
    for stream in range(5):
        alone = build_best_first(log_probs[stream : stream + 1], token_ids[stream : stream + 1], 25)
        assert same(batch.stream(stream), alone.stream(0))


def test_budget_zero_gives_the_root_alone():
    tree = build_best_first(*draft(3, 4, 8), 0)
    check_tree(tree)
    assert tree.token.tolist() == [[0]] * 3
    assert tree.num_nodes.tolist() == [1, 1, 1]
    assert tree.depth_limit == 4
    assert not tree.truncated.any()


@pytest.mark.parametrize("budget", [-1, True, 1.0, "4", None])
def test_budgets_that_are_no_count_are_refused(budget):
    with pytest.raises(ValueError, match="budget"):
        build_best_first(*draft(1, 2, 4), budget)


@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 3, 0), (2, 0, 0)])
def test_no_positions_or_no_candidates_give_the_root_alone(shape):
    tree = build_best_first(torch.zeros(shape), torch.zeros(shape, dtype=torch.int64), 4)
    check_tree(tree)
    assert tree.num_nodes.tolist() == [1, 1]
    assert tree.nonfinite_rows.tolist() == [0, 0]
    assert tree.missed_mass.tolist() == [[1.0] * shape[1]] * 2
    assert tree.truncated.tolist() == [shape[1] > 0] * 2


def test_budget_above_what_exists():
    tree = build_best_first(*rows([[-0.5, -1.0], [-0.5, -1.0]]), 50)
    check_tree(tree)
    assert tree.capacity == 51
    assert tree.num_nodes.tolist() == [7]
    assert tree.token[0, 7:].eq(-1).all()
    assert tree.parent[0, 7:].eq(-1).all()
    assert not tree.ancestor_mask()[0, 7:].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", [0, 2, 5])
def test_a_broken_row_ends_the_tree_above_it(value, row):
    log_probs, token_ids = draft(2, 6, 8)
    log_probs[0, row, 3] = value
    tree = build_best_first(log_probs, token_ids, 40)
    check_tree(tree)
    assert tree.nonfinite_rows.tolist() == [1, 0]
    assert int(tree.depth[0].max()) <= row
    whole = build_best_first(log_probs[:, :row], token_ids[:, :row], 40)
    assert paths(tree) == paths(whole)
    assert tree.missed_mass[0, row] == 1.0


def test_all_rows_broken_and_rows_without_anything_finite_count():
    log_probs, token_ids = draft(3, 4, 5)
    log_probs[0] = float("nan")
    log_probs[1, 2] = float("-inf")
    log_probs[1, 3, 0] = float("nan")
    tree = build_best_first(log_probs, token_ids, 30)
    assert tree.nonfinite_rows.tolist() == [4, 2, 0]
    assert tree.num_nodes[0] == 1
    assert tree.depth[1].max() == 2


def test_candidates_of_minus_infinity_never_become_nodes():
    inf = float("inf")
    log_probs, token_ids = rows([[-inf, -1.0, -inf], [-2.0, -inf, -3.0]], [[4, 5, -1], [6, 7, 7]])
    tree = build_best_first(log_probs, token_ids, 20)
    assert paths(tree)[1:] == [(5,), (5, 6), (5, 7)]
    assert tree.nonfinite_rows.tolist() == [0]


def test_token_zero_is_a_token():
    tree = build_best_first(*rows([[-0.1, -3.0], [-0.1, -3.0]], [[0, 1], [1, 0]]), 6)
    check_tree(tree)
    assert paths(tree)[1:3] == [(0,), (0, 1)]


def test_malformed_candidates_are_refused_with_their_place():
    log_probs, token_ids = draft(2, 3, 4)
    bad = token_ids.clone()
    bad[1, 2, 0] = bad[1, 2, 3]
    with pytest.raises(ValueError, match=r"token_ids\[1, 2, 3\].*distinct"):
        build_best_first(log_probs, bad, 4)
    bad[1, 2, 0] = -5
    with pytest.raises(ValueError, match=r"token_ids\[1, 2, 0\].*got -5"):
        build_best_first(log_probs, bad, 4)
    with pytest.raises(ValueError, match=r"token_ids\[0, 0, .\].*from 0 to 9"):
        build_best_first(log_probs, token_ids + 10, 4, vocab_size=10)
    log_probs[0, 1, 2] = 0.5
    with pytest.raises(ValueError, match=r"log_probs\[0, 1, 2\].*got 0.5"):
        build_best_first(log_probs, token_ids, 4)


@pytest.mark.parametrize("wrong", ["shape", "float ids", "int scores", "vocab"])
def test_malformed_arguments_are_refused(wrong):
    log_probs, token_ids = draft(1, 3, 4)
    calls = {
        "shape": (log_probs, token_ids[:, :2], None, "token_ids"),
        "float ids": (log_probs, token_ids.float(), None, "token_ids"),
        "int scores": (token_ids, token_ids, None, "log_probs"),
        "vocab": (log_probs, token_ids, 0, "vocab_size"),
    }
    scores, ids, vocab_size, named = calls[wrong]
    with pytest.raises(ValueError, match=named):
        build_best_first(scores, ids, 4, vocab_size=vocab_size)


def test_rounding_above_zero_counts_as_zero():
    tree = build_best_first(*rows([[3e-5, -9.0], [2e-5, -9.0]]), 2)
    check_tree(tree)
    assert paths(tree, field="rank")[1:] == [(0,), (0, 0)]
    assert tree.logp[0].tolist() == [0.0, 0.0, 0.0]


def test_too_few_candidates_are_marked_and_the_missed_mass_is_said():
    log_probs, token_ids = draft(2, 3, 8)
    tree = build_best_first(log_probs, token_ids, 9)
    assert tree.truncated.tolist() == [True, True]
    missed = 1 - log_probs.double().exp().sum(-1)
    assert torch.allclose(tree.missed_mass.double(), missed, atol=1e-6)
    assert (missed > 0).all()
    assert not build_best_first(log_probs, token_ids, 8).truncated.any()
    assert build_best_first(log_probs, token_ids, 9, vocab_size=64).truncated.all()


def test_the_whole_vocabulary_is_never_truncated():
    log_probs, token_ids = draft(2, 3, 8, vocab=8)
    assert not build_best_first(log_probs, token_ids, 100).truncated.any()
    assert not build_best_first(log_probs, token_ids, 100, vocab_size=8).truncated.any()
    # Ids 0..K-1 alone prove nothing, neither does a mass of 1 alone.
    light = log_probs - torch.tensor([0.5, 0.0]).view(2, 1, 1)
    assert build_best_first(light, token_ids, 100).truncated.tolist() == [True, False]
    assert build_best_first(log_probs, token_ids + 1, 100).truncated.all()


def test_one_child_a_node_equals_the_chain():
    log_probs, token_ids = draft(3, 7, 16, seed=9)
    spine = build_best_first(log_probs[..., :1], token_ids[..., :1], 7)
    chain = build_chain(log_probs, token_ids, 7)
    for name in ("token", "parent", "depth", "logp", "rank", "first_child", "next_sibling"):
        assert torch.equal(getattr(spine, name), getattr(chain, name))


@pytest.mark.parametrize("shape", [(1, 4096, 1), (1, 1, 4096), (1, 4096, 2)], ids=str)
def test_long_chains_and_wide_families(shape):
    # Certain tokens make every score tie, the worst case for the order of rank tuples.
    ids = torch.arange(shape[2]).expand(shape)
    start = time.perf_counter()
    tree = build_best_first(torch.zeros(shape), ids, 4096)
    check_tree(tree)
    assert time.perf_counter() - start < 30
    assert tree.num_nodes.tolist() == [4097]
    assert int(tree.depth.max()) == min(shape[1], 4096)
    assert int(tree.ancestor_mask()[0, -1].sum()) == int(tree.depth[0, -1]) + 1
