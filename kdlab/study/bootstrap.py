"""Bootstrap intervals over prompts: prompts are the independent draws, rounds of one prompt are not."""

import numpy as np

from kdlab.checks import check_int

# Fewer prompts than this give intervals that are far too narrow, so none is given, and medians that are no headline.
MIN_PROMPTS = 5


def resample_counts(num_prompts: int, num_resamples: int, seed: int) -> np.ndarray:
    """Draw prompts with replacement.

    Args:
        num_prompts: P, at least 1.
        num_resamples: how many times to draw P prompts, up to 1,000,000.
        seed: of numpy's PCG64.

    Returns:
        [num_resamples, P] float64: how often each prompt was drawn; each row sums to P.

    Raises:
        ArgumentError: a number is no integer or too small.
    """
    num_resamples = check_int("num_resamples", num_resamples, minimum=1, maximum=1_000_000)
    rng = np.random.default_rng(check_int("seed", seed, minimum=0))
    return rng.multinomial(num_prompts, np.full(num_prompts, 1.0 / num_prompts), size=num_resamples).astype(np.float64)


def percentile_interval(values: np.ndarray, num_prompts: int, level: float) -> tuple[float, float]:
    """Percentile interval of resampled values, NaN twice below `MIN_PROMPTS` prompts or where no value is finite.

    Args:
        values: [num_resamples] float64, NaN where a resample has no value.
        num_prompts: prompts that were resampled.
        level: share of the values inside, in (0, 1).
    """
    finite = values[np.isfinite(values)]
    if num_prompts < MIN_PROMPTS or not len(finite):
        return float("nan"), float("nan")
    low, high = np.quantile(finite, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Elementwise quotient, NaN where the denominator is 0."""
    shape = np.broadcast_shapes(np.shape(numerator), np.shape(denominator))
    return np.divide(numerator, denominator, out=np.full(shape, np.nan), where=np.asarray(denominator) != 0)
