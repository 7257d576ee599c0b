"""Paired comparisons: medians, intervals, the sign test, and Holm's adjustment."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from kdlab.errors import ArgumentError
from kdlab.study import compare_paired, holm
from kdlab.study.bootstrap import resample_counts
from kdlab.study.paired import _medians


def values(*numbers):
    return pd.Series(numbers, dtype=float)


def test_medians_changes_and_the_sign_test():
    first = values(10, 20, 30, 40, 50, 60, 70, 80)
    second = first * [1.1, 1.2, 1.1, 1.3, 1.1, 1.1, 0.9, 1.0]
    found = compare_paired(first, second)
    assert (found["higher"], found["lower"], found["equal"], found["num_prompts"]) == (6, 1, 1, 8)
    assert found["median_first"] == 45.0
    assert found["change"] == pytest.approx(0.1)
    assert found["change_low"] <= found["change"] <= found["change_high"]
    assert found["p_value"] == pytest.approx(2 * (1 + 7) / 2**7)  # 6 or 7 of 7, either way


def test_only_prompts_of_both_count_and_their_order_does_not():
    first = pd.Series({"a": 1.0, "b": 2.0, "c": 4.0})
    second = pd.Series({"c": 8.0, "d": 9.0, "b": 1.0})
    found = compare_paired(first, second)
    assert (found["num_prompts"], found["higher"], found["lower"]) == (2, 1, 1)
    assert found["median_first"] == 3.0
    assert np.isnan(found["change_low"])  # too few for an interval
    with pytest.raises(ArgumentError, match="prompts that"):
        compare_paired(first, pd.Series({"x": 1.0}))


def test_nothing_changed_is_no_evidence():
    assert compare_paired(values(1, 2, 3), values(1, 2, 3))["p_value"] == 1.0


@pytest.mark.parametrize("bad", [[1, 0], [1, -1], [1, float("nan")], [1, float("inf")]])
def test_values_that_have_no_ratio_are_refused(bad):
    with pytest.raises(ArgumentError, match="second"):
        compare_paired(values(1, 1), values(*bad))
    with pytest.raises(ArgumentError, match="first"):
        compare_paired(pd.Series([1.0, 2.0], index=[3, 3]), values(1, 1))


def test_the_sign_test_raises_no_more_false_alarms_than_it_states():
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(300):
        first = pd.Series(rng.lognormal(size=20))
        second = pd.Series(first * rng.lognormal(sigma=0.2, size=20))
        alarms += compare_paired(first, second, num_resamples=1)["p_value"] <= 0.05
    assert alarms <= 0.05 * 300 + 9  # the test is discrete: 4.1 % at 20 prompts
    assert binomtest(15, 20).pvalue <= 0.05 < binomtest(14, 20).pvalue


@pytest.mark.parametrize("num_values", [1, 2, 5, 8])
def test_resampled_medians_are_those_of_the_values_drawn(num_values):
    numbers = np.random.default_rng(1).normal(size=num_values)
    counts = resample_counts(num_values, 50, 0)
    drawn = [np.median(np.repeat(numbers, row.astype(int))) for row in counts]
    np.testing.assert_allclose(_medians(numbers, counts), drawn)


def test_holm():
    np.testing.assert_allclose(holm(np.array([0.01, 0.04, 0.03, 0.9])), [0.04, 0.09, 0.09, 0.9])
    np.testing.assert_allclose(holm(np.array([0.6, 0.7])), [1.0, 1.0])
