"""Two results of the same prompts: medians, the median change with its interval, and a sign test."""

from typing import Any

import numpy as np
import pandas as pd

from kdlab.checks import check_float
from kdlab.errors import ArgumentError
from kdlab.study.bootstrap import percentile_interval, resample_counts


def compare_paired(
    first: pd.Series, second: pd.Series, *, num_resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> dict[str, Any]:
    """Compare two results prompt by prompt; prompts that only one of them has are left out.

    The change of a prompt is second / first - 1. The sign test asks how likely so uneven a number of rises and falls is
    where each is as likely as the other (two-sided binomial test; prompts without a change count for neither).

    Args:
        first, second: one value above 0 a prompt, indexed by the prompt.
        num_resamples, level, seed: of the bootstrap over prompts; with fewer than 5 prompts the interval is NaN.

    Returns:
        num_prompts, median_first, median_second, change (the median one) with change_low and change_high, higher,
        lower and equal (prompts), and p_value (1 where no prompt changed).

    Raises:
        ArgumentError: a prompt comes twice, a value is not above 0, or no prompt is in both.
    """
    from scipy.stats import binomtest  # here: it takes a second to load

    level = check_float("level", level, above=0.0, below=1.0)
    for name, values in {"first": first, "second": second}.items():
        if not values.index.is_unique or not (values > 0).all() or not np.isfinite(values).all():
            raise ArgumentError(name, "one finite value above 0 for each prompt", values.to_dict())
    pairs = pd.concat({"first": first, "second": second}, axis=1).dropna()
    if pairs.empty:
        raise ArgumentError("second", "values of prompts that `first` has", list(second.index))
    changes = (pairs["second"] / pairs["first"] - 1.0).to_numpy(dtype=np.float64)
    drawn = _medians(changes, resample_counts(len(changes), num_resamples, seed))
    low, high = percentile_interval(drawn, len(changes), level)
    higher, lower = int((changes > 0).sum()), int((changes < 0).sum())
    return {
        "num_prompts": len(changes),
        "median_first": float(pairs["first"].median()),
        "median_second": float(pairs["second"].median()),
        "change": float(np.median(changes)),
        "change_low": low,
        "change_high": high,
        "higher": higher,
        "lower": lower,
        "equal": len(changes) - higher - lower,
        "p_value": float(binomtest(higher, higher + lower).pvalue) if higher + lower else 1.0,
    }


def holm(p_values: np.ndarray) -> np.ndarray:
    """Adjust the p values of several tests so that any false alarm among all of them is as rare as each states (Holm).

    Args:
        p_values: [N] float64.

    Returns:
        [N] float64, in the same order, none smaller than it was.
    """
    order = np.argsort(p_values, kind="stable")
    stepped = np.maximum.accumulate(p_values[order] * np.arange(len(p_values), 0, -1))
    adjusted = np.empty(len(p_values), dtype=np.float64)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def _medians(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Medians of `values` [P] in every resample, [R] from counts [R, P]: the mean of the two values in the middle."""
    order = np.argsort(values)
    reached = counts[:, order].cumsum(axis=1)
    middles = [np.argmax(reached >= rank, axis=1) for rank in ((len(values) + 1) // 2, len(values) // 2 + 1)]
    medians: np.ndarray = np.mean([values[order][middle] for middle in middles], axis=0)
    return medians
