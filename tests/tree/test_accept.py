"""Acceptance against a walk over dictionaries, and trees that no builder makes."""

import random
from dataclasses import replace

import pytest
import torch

from kdlab.tree import AcceptStatus, DraftTree, accept, build_best_first, build_chain, build_root_only
from tests.tree.samples import draft, paths, sample_tree


def naive_walk(tree, target, stream):
    children = {}
    for row in range(1, int(tree.num_nodes[stream])):
        children[(int(tree.parent[stream, row]), int(tree.token[stream, row]))] = row
    path = [0]
    while (path[-1], target[path[-1]]) in children:
        path.append(children[(path[-1], target[path[-1]])])
    return path, target[path[-1]]


def likely_target(tree, generator):
    """Return target tokens that mostly name a child of their row, so that walks go deep."""
    target = [[generator.randrange(12) for _ in range(tree.capacity)] for _ in range(tree.num_streams)]
    for stream in range(tree.num_streams):
        for row in range(int(tree.num_nodes[stream]) - 1, 0, -1):
            if generator.random() < 0.6:
                target[stream][int(tree.parent[stream, row])] = int(tree.token[stream, row])
    return target


def test_thousand_random_walks():
    generator, deepest = random.Random(0), 0
    for seed in range(250):
        log_probs, token_ids = draft(4, 1 + seed % 7, 1 + seed % 12, vocab=12, seed=seed)
        if seed % 5 == 0:
            log_probs[seed % 4, -1] = float("nan")
        tree = build_best_first(log_probs, token_ids, generator.randrange(40))
        target = likely_target(tree, generator)
        result = accept(tree, torch.tensor(target))
        assert result.status.tolist() == [0] * 4
        for stream in range(4):
            path, bonus = naive_walk(tree, target[stream], stream)
            padded = path + [-1] * (tree.depth_limit + 1 - len(path))
            assert result.path[stream].tolist() == padded
            assert (int(result.length[stream]), int(result.bonus[stream])) == (len(path) - 1, bonus)
            deepest = max(deepest, len(path))
    assert deepest == 8, "the walks must reach the depth limit"


def test_shapes_and_dtypes():
    result = accept(sample_tree(streams=2, depth=4), torch.zeros(2, 21, dtype=torch.int32))
    assert result.path.shape == (2, 5)
    assert {result.path.dtype, result.length.dtype, result.bonus.dtype, result.status.dtype} == {torch.int32}


def test_root_alone_accepts_nothing_and_gives_the_bonus():
    result = accept(build_root_only(2), torch.tensor([[7], [0]]))
    assert result.path.tolist() == [[0], [0]]
    assert result.bonus.tolist() == [7, 0]
    assert result.length.tolist() == [0, 0]


def test_token_zero_is_accepted():
    tree = DraftTree.from_parents([9, 0, 0], [-1, 0, 1])
    result = accept(tree, torch.tensor([[0, 0, 0]]))
    assert result.path.tolist() == [[0, 1, 2]]
    assert result.bonus.tolist() == [0]


def test_paths_that_skip_rows():
    tree = DraftTree.from_parents([9, 1, 2, 3, 4, 5], [-1, 0, 0, 2, 0, 4])
    result = accept(tree, torch.tensor([[2, 0, 3, 8, 5, 6]]))
    assert result.path.tolist() == [[0, 2, 3]]
    assert result.bonus.tolist() == [8]


def test_rows_of_nan_match_nothing_and_unused_rows_are_never_matched():
    tree = DraftTree.from_parents([[9, 1, 2], [9, 1, -1]], [[-1, 0, 1], [-1, 0, -1]])
    result = accept(tree, torch.tensor([[-1, 2, 2], [1, -1, -1]]))
    assert result.path.tolist() == [[0, -1, -1], [0, 1, -1]]
    assert result.length.tolist() == [0, 1]
    assert result.bonus.tolist() == [-1, -1]
    assert result.status.tolist() == [0, 0]
    assert accept(tree, torch.tensor([[-7, 2, 2], [1, 5, 5]])).bonus.tolist() == [-1, 5]


def test_a_tree_that_holds_the_chain_accepts_no_less():
    for seed in range(100):
        log_probs, token_ids = draft(2, 5, 8, vocab=12, seed=seed)
        chain, tree = build_chain(log_probs, token_ids, 5), build_best_first(log_probs, token_ids, 60)
        text = torch.where(torch.rand(2, 6, generator=torch.Generator().manual_seed(seed)) < 0.8, 0, 1)
        want = torch.cat([token_ids.gather(2, text[:, :5, None])[..., 0], torch.zeros(2, 1, dtype=torch.int64)], 1)
        lengths = [accept(one, want.gather(1, one.depth.long())).length for one in (tree, chain)]
        for stream in range(2):
            if set(paths(chain, stream)) <= set(paths(tree, stream)):
                assert lengths[0][stream] >= lengths[1][stream]


@pytest.mark.parametrize("target", [torch.zeros(2, 20, dtype=torch.int64), torch.zeros(2, 21), torch.zeros(21).int()])
def test_malformed_targets_are_refused(target):
    with pytest.raises(ValueError, match="target_tokens"):
        accept(sample_tree(budget=20), target)


MALFORMED = {
    "own parent": ("parent", 4, 4, AcceptStatus.BAD_ORDER),
    "two-cycle": ("parent", 1, 3, AcceptStatus.BAD_ORDER),
    "late parent": ("parent", 3, 4, AcceptStatus.BAD_ORDER),
    "parent missing": ("parent", 4, 99, AcceptStatus.BAD_PARENT),
    "parent unused": ("parent", 4, 5, AcceptStatus.BAD_PARENT),
    "second root": ("parent", 2, -1, AcceptStatus.BAD_PARENT),
    "no root": ("parent", 0, 2, AcceptStatus.BAD_PARENT),
    "deep": ("depth", 4, 9, AcceptStatus.BAD_DEPTH),
    "deep root": ("depth", 0, 1, AcceptStatus.BAD_DEPTH),
    "negative token": ("token", 3, -1, AcceptStatus.BAD_TOKEN),
    "twins": ("token", 4, 1, AcceptStatus.DUPLICATE_CHILD),
    "sibling cycle": ("next_sibling", 4, 3, AcceptStatus.BAD_LINK),
    "own sibling": ("next_sibling", 4, 4, AcceptStatus.BAD_LINK),
    "sibling missing": ("next_sibling", 4, 99, AcceptStatus.BAD_LINK),
    "sibling unused": ("next_sibling", 4, 5, AcceptStatus.BAD_LINK),
    "sibling of the root": ("next_sibling", 0, 1, AcceptStatus.BAD_LINK),
    "child cycle": ("first_child", 3, 0, AcceptStatus.BAD_LINK),
    "diamond": ("first_child", 2, 3, AcceptStatus.BAD_LINK),
    "child negative": ("first_child", 2, -2, AcceptStatus.BAD_LINK),
    "child lost": ("first_child", 1, -1, AcceptStatus.BAD_LINK),
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_a_malformed_tree_gets_a_status_and_leaves_the_others_alone(case, stream):
    field, node, value, status = MALFORMED[case]
    row = ([9, 1, 2, 1, 2, -1], [-1, 0, 0, 1, 1, -1])
    tree = DraftTree.from_parents(*([part] * 3 for part in row))
    target = torch.tensor([[1, 2, 0, 0, 6, 0]] * 3)
    good = accept(tree, target)
    assert good.path[0].tolist() == [0, 1, 4]
    assert good.status.tolist() == [0, 0, 0]
    changed = getattr(tree, field).clone()
    changed[stream, node] = value
    bad = accept(replace(tree, **{field: changed}), target)
    assert bad.status[stream] == status
    assert bad.path[stream].tolist() == [-1, -1, -1]
    assert (int(bad.length[stream]), int(bad.bonus[stream])) == (0, -1)
    others = [other for other in range(3) if other != stream]
    for name in ("path", "length", "bonus", "status"):
        assert torch.equal(getattr(bad, name)[others], getattr(good, name)[others])


@pytest.mark.parametrize("count", [0, -1, 22])
def test_sizes_that_cannot_be_get_a_status(count):
    tree = replace(sample_tree(), num_nodes=torch.tensor([21, count], dtype=torch.int32))
    assert accept(tree, torch.zeros(2, 21, dtype=torch.int64)).status.tolist() == [0, AcceptStatus.BAD_SIZE]


def test_random_links_end_and_are_not_believed():
    generator = torch.Generator().manual_seed(0)
    tree = sample_tree(streams=8, budget=20)
    for _ in range(50):
        links = {
            name: torch.randint(-3, 30, (8, 21), generator=generator, dtype=torch.int32)
            for name in ("parent", "first_child", "next_sibling", "depth")
        }
        result = accept(replace(tree, **links), torch.randint(0, 64, (8, 21), generator=generator))
        assert (result.status != 0).all()
        assert (result.path == -1).all()


def test_long_chain():
    tree = DraftTree.from_parents([0] * 4097, [-1, *range(4096)])
    result = accept(tree, torch.zeros(1, 4097, dtype=torch.int64))
    assert result.length.tolist() == [4096]
    assert result.status.tolist() == [0]


@pytest.mark.gpu
def test_gpu_acceptance_equals_cpu_acceptance():
    tree, target = sample_tree(budget=60, width=12), torch.randint(0, 64, (2, 61))
    ours, theirs = accept(tree.to("cuda"), target.cuda()), accept(tree, target)
    for name in ("path", "length", "bonus", "status"):
        assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name))
