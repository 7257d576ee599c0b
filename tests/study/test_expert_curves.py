"""Expert curves: every way to pick rows, on a hand-made round and on rounds whose correlation is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kdlab.errors import ArgumentError
from kdlab.study.expert_curves import KINDS, expert_curve, exponents


def record(ids, parent, rank, path, prompt=0):
    """A round with expert ids [rows, k] in one layer."""
    tree = SimpleNamespace(parent=torch.tensor([parent]), rank=torch.tensor([rank]))
    return SimpleNamespace(expert_ids=np.array([ids]), tree=tree, path=path, prompt=prompt)


# Root 0 with children 1 (rank 0) and 3 (rank 1); 2 is the first child of 1, 4 its second.
ROUND = record([[0, 1], [1, 2], [2, 3], [4, 5], [6, 7]], [-1, 0, 1, 0, 1], [0, 0, 0, 1, 1], (0, 3))


@pytest.mark.parametrize(
    ("kind", "rows", "distinct"),
    [("tree", 3, 4), ("tree", 4, 6), ("chain", 3, 4), ("siblings", 2, 4), ("text", 2, 4), ("tree", 1, 2)],
)
def test_rows_are_picked_as_the_kind_says(kind, rows, distinct):
    table = expert_curve([ROUND], kind, [rows])
    assert table["distinct"].tolist() == [distinct]


def test_what_a_round_cannot_give_is_left_out():
    assert expert_curve([ROUND], "chain", [4]).empty
    assert expert_curve([ROUND], "strangers", [2]).empty


def test_text_goes_on_over_rounds_of_a_prompt_and_not_over_prompts():
    other = record([[8, 9]], [-1], [0], (0,), prompt=1)
    rounds = [ROUND, record([[10, 11]], [-1], [0], (0,)), other]
    table = expert_curve(rounds, "text", [3])
    assert (table["distinct"].tolist(), table["picks"].tolist()) == ([6.0], [1])


def test_independent_rows_have_exponent_one_and_alike_rows_less():
    draw = np.random.default_rng(0)
    rounds, alike = [], []
    for _ in range(60):
        free = [draw.choice(384, 8, replace=False) for _ in range(33)]
        pool = draw.choice(384, 40, replace=False)
        bound = [draw.choice(pool, 8, replace=False) for _ in range(33)]
        chain = ([-1, *range(32)], [0] * 33, tuple(range(33)))
        rounds.append(record(free, *chain))
        alike.append(record(bound, *chain))
    sizes = {"num_experts": 384, "per_token": 8}
    independent = exponents(expert_curve(rounds, "tree", [2, 8, 33]), **sizes)["g"]
    correlated = exponents(expert_curve(alike, "chain", [2, 8, 33]), **sizes)["g"]
    strangers = exponents(expert_curve(alike, "strangers", [2, 8, 33]), **sizes)["g"]
    assert independent[0] == pytest.approx(1.0, abs=0.02)
    assert correlated[0] < 0.7
    assert strangers[0] == pytest.approx(1.0, abs=0.03)


def test_wrong_arguments_are_named():
    with pytest.raises(ArgumentError, match="kind"):
        expert_curve([ROUND], "cousins", [2])
    with pytest.raises(ArgumentError, match="rounds"):
        expert_curve([], KINDS[0], [2])
    with pytest.raises(ArgumentError, match="rows"):
        expert_curve([ROUND], "tree", [0])
    without = SimpleNamespace(expert_ids=None)
    with pytest.raises(ArgumentError, match="record_experts"):
        expert_curve([without], "tree", [2])
