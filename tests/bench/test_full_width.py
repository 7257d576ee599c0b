"""Full-width rounds: planned routing touches what it should, and random weights keep activations finite."""

import numpy as np
import pytest

from kdlab.bench.full_width.routing import planned_ids
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
