"""How many experts of a layer a round's rows touch: the formulas of correlated routing, and recorded expert ids."""

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from kdlab.checks import check_float, check_int
from kdlab.errors import ArgumentError
from kdlab.kernels.moe_int4 import expected_experts

_DRAWS = 4000


def distinct_experts(tokens: float, *, num_experts: int, per_token: int, g: float = 1.0, streams: int = 1) -> float:
    """Return the distinct experts of one layer that rows touch together: U = E (1 - (1 - k/E)^(S n^g)).

    The exponent g says how alike rows of one stream route: 1 independently, 0 all like one row. Streams route
    independently of each other.

    Args:
        tokens: n, rows of one stream, above 0.
        num_experts: E.
        per_token: k, experts of a row.
        g: 0 to 1.
        streams: S.
    """
    check_int("per_token", per_token, minimum=1, maximum=check_int("num_experts", num_experts, minimum=1))
    check_float("tokens", tokens, above=0.0)
    check_float("g", g, minimum=0.0, maximum=1.0)
    check_int("streams", streams, minimum=1)
    return expected_experts(streams * tokens**g, per_token, num_experts)


def count_distinct(expert_ids: ArrayLike) -> np.ndarray:
    """Return how many distinct experts each layer used: [layers] i64 of expert_ids [layers, rows, k] int.

    Raises:
        ArgumentError: expert_ids has other axes, or no row.
    """
    ids = np.asarray(expert_ids)
    if ids.ndim != 3 or not ids[0].size:
        raise ArgumentError("expert_ids", "[layers, rows, k], at least one row", list(ids.shape))
    flat = np.sort(ids.reshape(len(ids), -1), axis=1)
    return 1 + (np.diff(flat, axis=1) != 0).sum(axis=1)


def fit_g(tokens: ArrayLike, distinct: ArrayLike, *, num_experts: int, per_token: int) -> float:
    """Return the exponent g that explains mean distinct counts best, by least squares of log T_eff on log T.

    Args:
        tokens: rows of each point, at least one of them above 1.
        distinct: distinct experts of each point, below E.
        num_experts: E.
        per_token: k.
    """
    rows, used = np.asarray(tokens, dtype=np.float64), np.asarray(distinct, dtype=np.float64)
    if rows.shape != used.shape or not (rows > 1).any():
        raise ArgumentError("tokens", "as many as distinct, one of them above 1", rows.tolist())
    if ((used <= 0) | (used >= num_experts)).any():
        raise ArgumentError("distinct", f"above 0 and below {num_experts}", used.tolist())
    effective = np.log(np.log1p(-used / num_experts) / np.log1p(-per_token / num_experts))
    logs = np.log(rows)
    return float((effective * logs).sum() / (logs * logs).sum())


def busiest_rank(distinct: float, ranks: int, num_experts: int) -> float:
    """Return the mean number of distinct experts on the rank that holds most of them, E / ranks whole experts a rank.

    The distinct experts are drawn without replacement; 4,000 fixed draws, linear between whole numbers of experts.

    Raises:
        ArgumentError: ranks does not divide num_experts, or distinct is above num_experts.
    """
    check_float("distinct", distinct, above=0.0, maximum=float(num_experts))
    if num_experts % check_int("ranks", ranks, minimum=1):
        raise ArgumentError("ranks", f"a divisor of {num_experts}", ranks)
    low = int(distinct)
    counts = [_busiest(size, ranks, num_experts) for size in (low, min(low + 1, num_experts))]
    return counts[0] + (distinct - low) * (counts[1] - counts[0])


@lru_cache(maxsize=4096)
def _busiest(distinct: int, ranks: int, num_experts: int) -> float:
    """Mean over the draws, for a whole number of distinct experts."""
    chosen = _shuffled_ranks(ranks, num_experts)[:, :distinct]
    return float(np.stack([(chosen == rank).sum(axis=1) for rank in range(ranks)]).max(axis=0).mean())


@lru_cache(maxsize=8)
def _shuffled_ranks(ranks: int, num_experts: int) -> np.ndarray:
    """The rank of every expert, in a random order a draw: [_DRAWS, num_experts] int."""
    rank_of = np.repeat(np.arange(ranks, dtype=np.int16), num_experts // ranks)
    return np.random.default_rng(0).permuted(np.tile(rank_of, (_DRAWS, 1)), axis=1)
