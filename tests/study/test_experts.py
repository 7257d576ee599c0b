"""Distinct experts: the formulas against published numbers and against drawn routings."""

import numpy as np
import pytest

from kdlab.errors import ArgumentError
from kdlab.study.experts import busiest_rank, count_distinct, distinct_experts, fit_g
from tests.study.k26 import EXPERTS


@pytest.mark.parametrize(("rows", "g", "expected"), [(1, 1.0, 8.0), (33, 1.0, 192.3), (64, 0.88, 215), (8, 0.78, 38.8)])
def test_distinct_experts_of_correlated_rows(rows, g, expected):
    assert distinct_experts(rows, g=g, **EXPERTS) == pytest.approx(expected, abs=0.6)


def test_streams_route_independently():
    assert distinct_experts(8, g=0.8, streams=4, **EXPERTS) > 2 * distinct_experts(8, g=0.8, **EXPERTS)
    assert distinct_experts(1, g=0.5, streams=32, **EXPERTS) == pytest.approx(distinct_experts(32, **EXPERTS))


def test_counted_experts_of_drawn_rows_are_the_formula():
    rng = np.random.default_rng(3)
    ids = np.stack([[rng.choice(384, 8, replace=False) for _ in range(33)] for _ in range(200)])
    assert count_distinct(ids).mean() == pytest.approx(192.3, rel=0.01)
    assert count_distinct([[[3, 5], [5, 3]], [[0, 1], [2, 3]]]).tolist() == [2, 4]


@pytest.mark.parametrize("g", [0.7, 0.8, 1.0])
def test_the_exponent_is_found_again(g):
    rows = [1, 8, 17, 64]
    used = [distinct_experts(n, g=g, **EXPERTS) for n in rows]
    assert fit_g(rows, used, **EXPERTS) == pytest.approx(g)
    assert fit_g(rows, [0.9 * u for u in used], **EXPERTS) < g - 0.01


# Means over 8 ranks of 48 experts, as published for independent routing.
@pytest.mark.parametrize(("rows", "expected"), [(1, 2.60), (4, 6.8), (16, 18.2), (64, 39.6), (128, 47.0)])
def test_the_busiest_rank_holds_more_than_its_share(rows, expected):
    assert busiest_rank(distinct_experts(rows, **EXPERTS), 8, 384) == pytest.approx(expected, rel=0.015)


def test_one_rank_and_all_experts_leave_no_chance():
    assert busiest_rank(17.5, 1, 384) == pytest.approx(17.5)
    assert busiest_rank(384.0, 8, 384) == pytest.approx(48.0)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: distinct_experts(0.0, **EXPERTS), "tokens"),
        (lambda: distinct_experts(4, g=1.5, **EXPERTS), "g"),
        (lambda: distinct_experts(4, num_experts=4, per_token=5), "per_token"),
        (lambda: count_distinct([[1, 2]]), "expert_ids"),
        (lambda: fit_g([1], [8.0], **EXPERTS), "tokens"),
        (lambda: fit_g([2], [384.0], **EXPERTS), "distinct"),
        (lambda: busiest_rank(8.0, 7, 384), "ranks"),
        (lambda: busiest_rank(400.0, 8, 384), "distinct"),
    ],
)
def test_wrong_arguments_are_named(call, name):
    with pytest.raises(ArgumentError, match=name):
        call()
