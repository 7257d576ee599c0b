"""Summaries over prompts: tokens per round with bootstrap intervals, and the histogram of round lengths."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from kdlab.checks import check_float
from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study.bootstrap import percentile_interval, ratio, resample_counts
from kdlab.study.compare import ACCEPTANCE_FIELDS, check_table

_ARM_COLUMNS = ("budget", "rows", "truncated")


def summarize(
    table: pd.DataFrame,
    by: Sequence[str] = ("method", "setting"),
    *,
    num_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """Summarize a sweep table over its prompts.

    Two means are given because they answer different questions and published numbers mix them: tokens_per_round is
    total tokens / total rounds, the one that speed follows; mean_prompt_tokens_per_round is the mean over prompts of
    each prompt's own mean. Intervals are percentile bootstraps over prompts; with fewer than 5 prompts they are NaN.

    Args:
        table: rows of the sweeps, one a (arm, prompt); several sweeps may be concatenated.
        by: columns to group by; add "kind" for one row a kind of text.
        num_resamples: bootstrap draws.
        level: share inside the intervals.
        seed: of the draws; every group uses the same draws, so that groups of equal prompts stay paired.

    Returns:
        One row a group, in order of appearance: the `by` columns, budget, rows, truncated, num_prompts, num_rounds,
        tokens_per_round with _low and _high, mean_prompt_tokens_per_round with _low and _high, rows_per_round (over
        rounds), rounds_by_rows ({rows: rounds}), simulated and the provenance columns.

    Raises:
        ArgumentError: columns are missing, a prompt comes twice in a group, or a number is out of range.
        ComparisonError: rows of one group differ in provenance.
    """
    level = check_float("level", level, above=0.0, below=1.0)
    if not isinstance(table, pd.DataFrame):
        raise ArgumentError("table", "the table of a sweep", type(table).__name__)
    keys = [by] if isinstance(by, str) else list(by) if isinstance(by, Iterable) else []
    if not keys:
        raise ArgumentError("by", "names of columns", repr(by))
    missing = [name for name in (*keys, "round_lengths") if name not in table.columns]
    if missing:
        raise ArgumentError("table", f"columns {', '.join(missing)}", ", ".join(map(str, table.columns)))
    rows = []
    draws = cache(lambda num_prompts: resample_counts(num_prompts, num_resamples, seed))
    for key, group in table.groupby(keys, sort=False, dropna=False):
        _check_group(group, key)
        intervals = _intervals(group, draws(len(group)), level)
        rows.append(dict(zip(keys, key, strict=True)) | _facts(group, keys) | intervals)
    return pd.DataFrame.from_records(rows)


def length_histogram(table: pd.DataFrame) -> pd.DataFrame:
    """Count rounds by their length, for each arm.

    Args:
        table: rows of the sweeps.

    Returns:
        Columns method, setting, length (1 to the longest of the table: accepted draft tokens + 1), num_rounds and share
        (of the arm's rounds; NaN without any); lengths that did not occur stand with 0.
    """
    longest = max(chain.from_iterable(table["round_lengths"]), default=1)
    rows = []
    for (method, setting), group in table.groupby(["method", "setting"], sort=False):
        counts = Counter(chain.from_iterable(group["round_lengths"]))
        total = sum(counts.values())
        for length in range(1, longest + 1):
            share = counts[length] / total if total else float("nan")
            rows.append((method, setting, length, counts[length], share))
    return pd.DataFrame(rows, columns=["method", "setting", "length", "num_rounds", "share"])


def _check_group(group: pd.DataFrame, key: Hashable) -> None:
    check_table(group, fields=(*ACCEPTANCE_FIELDS, "simulated"))
    if "rows" in group and group["rows"].nunique() > 1:
        raise ComparisonError(f"rows: group {key} mixes arms of {sorted(set(group['rows']))} verify rows")
    if group["prompt"].duplicated().any():
        raise ArgumentError("table", "each prompt once in a group", f"prompt {_first_twice(group)} twice in {key}")


def _first_twice(group: pd.DataFrame) -> Any:
    return group.loc[group["prompt"].duplicated(), "prompt"].iloc[0]


def _facts(group: pd.DataFrame, keys: Sequence[str]) -> dict[str, Any]:
    """What is equal in all rows of a group, and its rounds by verified rows."""
    kept = [*_ARM_COLUMNS, *ACCEPTANCE_FIELDS, "top_k", "simulated"]
    facts = {name: group[name].iloc[0] for name in kept if name in group.columns and name not in keys}
    by_rows = Counter(chain.from_iterable(group["round_rows"]))
    total = sum(by_rows.values())
    mean_rows = sum(rows * count for rows, count in by_rows.items()) / total if total else float("nan")
    return facts | {
        "num_prompts": len(group),
        "num_rounds": int(group["num_rounds"].sum()),
        "rows_per_round": mean_rows,
        "rounds_by_rows": dict(sorted(by_rows.items())),
    }


def _intervals(group: pd.DataFrame, counts: np.ndarray, level: float) -> dict[str, float]:
    """Both means of tokens per round, with their intervals from `resample_counts`' draws."""
    tokens = np.array([sum(lengths) for lengths in group["round_lengths"]], dtype=np.float64)
    rounds = group["num_rounds"].to_numpy(dtype=np.float64)
    means, with_rounds = np.nan_to_num(ratio(tokens, rounds)), (rounds > 0).astype(np.float64)
    result: dict[str, float] = {}
    for name, top, bottom in (
        ("tokens_per_round", tokens, rounds),
        ("mean_prompt_tokens_per_round", means, with_rounds),
    ):
        low, high = percentile_interval(ratio(counts @ top, counts @ bottom), len(group), level)
        result |= {name: float(ratio(top.sum(), bottom.sum())), f"{name}_low": low, f"{name}_high": high}
    return result
