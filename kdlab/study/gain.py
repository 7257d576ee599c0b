"""What a tree gains in tokens per round over the best chain, for each kind of text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from kdlab.checks import check_float
from kdlab.errors import ArgumentError
from kdlab.study.bootstrap import percentile_interval, ratio, resample_counts
from kdlab.study.compare import check_table


def gain_by_kind(
    table: pd.DataFrame, budgets: Sequence[int], *, num_resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> pd.DataFrame:
    """Compare trees with the best chain of each kind, in tokens per round.

    The best chain is the one with the longest rounds, whatever its length; every resample chooses it anew, which leans
    against the tree. No cost is in this: a tree of 64 nodes verifies more rows than any chain.

    Args:
        table: rows of `sweep` and `sweep_chains`.
        budgets: tree budgets of the table to compare.
        num_resamples, level, seed: of the bootstrap over prompts; with fewer than 5 prompts the interval is NaN.

    Returns:
        One row a (kind, budget): kind, num_prompts, chain (length of the best), chain_tokens_per_round, budget,
        tokens_per_round, gain (quotient minus 1), gain_low and gain_high.

    Raises:
        ArgumentError: a kind has no chain, or no tree of one of the budgets.
        ComparisonError: rows differ in provenance.
    """
    level = check_float("level", level, above=0.0, below=1.0)
    check_table(table)
    rows = []
    for kind, group in table.groupby("kind", sort=False):
        chains = _per_prompt(group[group["method"] == "chain"])
        trees = _per_prompt(group[(group["method"] == "ddtree") & group["setting"].isin(budgets)])
        missing = [budget for budget in budgets if budget not in trees]
        if not chains or missing:
            raise ArgumentError("table", f"chains, and trees of budgets {list(budgets)}, of {kind}", f"no {missing}")
        counts = resample_counts(group["prompt"].nunique(), num_resamples, seed)
        rows += [_row(kind, chains, budget, trees[budget], counts, level) for budget in budgets]
    return pd.DataFrame.from_records(rows)


def _per_prompt(rows: pd.DataFrame) -> dict[int, np.ndarray]:
    """Tokens and rounds of every setting: {setting: [2, P] f64}, prompts in one order."""
    found = {}
    for setting, group in rows.groupby("setting", sort=True):
        ordered = group.sort_values("prompt")
        tokens = [sum(lengths) for lengths in ordered["round_lengths"]]
        found[int(setting)] = np.array([tokens, ordered["num_rounds"].tolist()], dtype=np.float64)
    return found


def _row(
    kind: Any, chains: dict[int, np.ndarray], budget: int, tree: np.ndarray, counts: np.ndarray, level: float
) -> dict[str, Any]:
    means = {length: float(ratio(*chain.sum(axis=1))) for length, chain in chains.items()}
    best = max(means, key=lambda length: means[length])
    drawn_chains = np.stack([ratio(counts @ tokens, counts @ rounds) for tokens, rounds in chains.values()])
    drawn = ratio(counts @ tree[0], counts @ tree[1]) / drawn_chains.max(axis=0) - 1.0
    low, high = percentile_interval(drawn, counts.shape[1], level)
    mean = float(ratio(*tree.sum(axis=1)))
    return {
        "kind": kind,
        "num_prompts": counts.shape[1],
        "chain": best,
        "chain_tokens_per_round": means[best],
        "budget": budget,
        "tokens_per_round": mean,
        "gain": mean / means[best] - 1.0,
        "gain_low": low,
        "gain_high": high,
    }
