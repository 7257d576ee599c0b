"""Full-width rounds: planned routing touches what it should, and random weights keep activations finite."""

import numpy as np
import pytest

from kdlab.bench.full_width.point import Point
from kdlab.bench.full_width.routing import planned_ids
from kdlab.bench.full_width.suite import ROWS, bench_round, points
from kdlab.errors import ArgumentError


@pytest.mark.parametrize(("tokens", "distinct"), [(1, 8), (4, 31), (33, 192), (65, 286), (128, 384), (7, 8), (3, 9)])
def test_planned_rows_touch_as_many_experts_as_planned(tokens, distinct):
    ids = planned_ids(tokens, distinct, 384, 8, seed=1)
    assert (ids.shape, ids.dtype) == ((tokens, 8), np.int32)
    assert len(np.unique(ids)) == distinct
    assert all(len(set(row)) == 8 for row in ids.tolist())
    uses = np.bincount(ids.ravel(), minlength=384)
    assert uses.max() - uses[uses > 0].min() <= 1


def test_plans_of_other_seeds_differ():
    assert (planned_ids(8, 40, 384, 8, seed=1) != planned_ids(8, 40, 384, 8, seed=2)).any()


@pytest.mark.parametrize("distinct", [7, 9, 385])
def test_impossible_plans_are_refused(distinct):
    with pytest.raises(ArgumentError, match="distinct"):
        planned_ids(1, distinct, 384, 8, seed=0)


def test_whole_experts_make_the_first_rank_the_busiest():
    ids = planned_ids(8, 59, 384, 8, seed=3, held=(48, 11))
    assert len(np.unique(ids)) == 59
    assert len(np.unique(ids[ids < 48])) == 11
    with pytest.raises(ArgumentError, match="held"):
        planned_ids(8, 59, 384, 8, seed=3, held=(48, 49))


def test_every_row_count_is_measured_with_its_stages_and_each_point_once():
    chosen = points()
    assert len({point for point, _ in chosen}) == len(chosen)
    assert {point.rows for point, with_stages in chosen if with_stages and point.streams == 1} == set(ROWS)
    assert {point.streams for point, _ in chosen} == {1, 4, 8, 16, 32}


def test_distinct_experts_of_a_point_are_the_formula():
    assert Point(1, 1, 0, 0.8).distinct(384, 8) == pytest.approx(8)
    assert Point(8, 1, 0, 0.8).distinct(384, 8) == pytest.approx(40.4, abs=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_two_layers_of_one_rank_are_measured_whole_and_by_stage(experts):
    chosen = [(Point(1, 1, 64, 1.0), True), (Point(9, 2, 64, 0.8), True)]
    found = bench_round(ranks=8, experts=experts, layers=2, chosen=chosen)
    assert found.messages == ()
    rows = found.rows
    assert set(rows["metric"]) == {"round", "floor", "loop", "collectives", "stage", "stage floor"}
    for _, point in rows.groupby("rows"):
        median = point.set_index("metric")["value"]
        whole = median["round"]
        stages = median["stage"].sum()
        assert 0.7 * whole < stages < 1.6 * whole
        assert median["floor"] < whole
        assert whole < 1.5 * median["loop"]
    named = rows.loc[(rows["metric"] == "stage") & (rows["rows"] == 9), "case"].str.extract('"stage": "([^"]+)"')[0]
    assert {"experts", "attention", "tree_build", "draft_topk", "commit", "lm_head", "other"} <= set(named)
