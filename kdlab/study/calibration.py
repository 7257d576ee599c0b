"""Whether the draft's probabilities mean what they say, and what its top K leaves out."""

import numpy as np
import pandas as pd

from kdlab.checks import check_int
from kdlab.decode.field import DraftField
from kdlab.study.acceptance import prefix_matched
from kdlab.study.bootstrap import ratio
from kdlab.study.walk import check_field


def calibration(
    field: DraftField, bins: int = 10, *, max_rank: int | None = None, given_budget: int | None = None
) -> pd.DataFrame:
    """Compare the draft's probabilities with how often the target chose the token, depth by depth.

    Every recorded candidate of every position is one entry: its probability, and whether it is the target's token. The
    expected calibration error is sum over bins of (entries in bin / entries) |observed - mean predicted|. With many
    candidates most entries lie near 0 and the error is small by that alone; max_rank=1 gives the usual error of the
    best token.

    Args:
        field: recorded draft field.
        bins: number of bins of equal width over [0, 1], 1 to 10,000.
        max_rank: keep candidates of rank 0..max_rank-1; None keeps all K.
        given_budget: keep a depth of a position only where the target's tokens of all smaller depths are in the
            best-first tree of this budget, which is where the probability is used; None keeps all positions.

    Returns:
        One row a (depth, bin): bin_low, bin_high, num_entries, mean_predicted and observed (NaN in an empty bin), and
        calibration_error of the whole depth, repeated in its rows.

    Raises:
        ArgumentError: a number is no integer or too small.
    """
    check_field(field)
    bins = check_int("bins", bins, minimum=1, maximum=10_000)
    kept = field.top_k if max_rank is None else check_int("max_rank", max_rank, minimum=1, maximum=field.top_k)
    keep = None if given_budget is None else np.concatenate(prefix_matched(field, given_budget))
    predicted = np.concatenate([prompt.log_probs[: prompt.num_starts, :, :kept] for prompt in field.prompts])
    predicted = np.exp(predicted, dtype=np.float64)
    chosen = _chosen(field)[:, :, :kept]
    tables = []
    for depth in range(field.depth_limit):
        rows = slice(None) if keep is None else keep[:, depth]
        table = _reliability(predicted[rows, depth].ravel(), chosen[rows, depth].ravel(), bins)
        table.insert(0, "depth", depth + 1)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _reliability(predicted: np.ndarray, chosen: np.ndarray, bins: int) -> pd.DataFrame:
    """One depth: predicted [entries] float64 and chosen [entries] bool to a row a bin; NaN entries are left out."""
    usable = np.isfinite(predicted)
    predicted, chosen = predicted[usable], chosen[usable]
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    number = np.bincount(index, minlength=bins)
    mean = ratio(np.bincount(index, weights=predicted, minlength=bins), number)
    observed = ratio(np.bincount(index, weights=chosen, minlength=bins), number)
    error = np.nansum(number * np.abs(observed - mean)) / number.sum() if len(predicted) else float("nan")
    edges = np.arange(bins + 1) / bins
    return pd.DataFrame({
        "bin": np.arange(bins),
        "bin_low": edges[:-1],
        "bin_high": edges[1:],
        "num_entries": number,
        "mean_predicted": mean,
        "observed": observed,
        "calibration_error": error,
    })


def _chosen(field: DraftField) -> np.ndarray:
    """Whether each candidate is the target's token: [positions of all prompts, L, K] bool."""
    return np.concatenate([
        (prompt.token_ids == prompt.next_ids[..., None])[: prompt.num_starts] for prompt in field.prompts
    ])


def missed_mass(field: DraftField) -> pd.DataFrame:
    """Draft probability outside the top K, depth by depth, over the positions rounds may start at.

    Returns:
        One row a depth: num_positions (those with a finite draft row), mean, median, p90 and maximum of
        1 - sum of the K probabilities, and next_outside, the share of positions whose next token is not among the K.
    """
    check_field(field)
    log_probs = np.concatenate([prompt.log_probs[: prompt.num_starts] for prompt in field.prompts])
    mass = 1.0 - np.exp(log_probs, dtype=np.float64).sum(axis=-1)
    found = _chosen(field).max(axis=-1)
    rows = []
    for depth in range(field.depth_limit):
        usable = np.isfinite(mass[:, depth])
        # Rounding of the K terms can leave a sum a little over 1.
        values = np.maximum(mass[usable, depth], 0.0)
        stats = [values.mean(), *np.quantile(values, [0.5, 0.9]), values.max()] if len(values) else [float("nan")] * 4
        rows.append((depth + 1, len(values), *stats, float((~found[:, depth]).mean()) if len(found) else float("nan")))
    return pd.DataFrame(rows, columns=["depth", "num_positions", "mean", "median", "p90", "maximum", "next_outside"])
