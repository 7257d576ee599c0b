"""Timed rounds as the cost half of a study."""

import pandas as pd

from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study import CostTable


def cost_table(rows: pd.DataFrame) -> CostTable:
    """Return the round times of one `time_rounds` call as a CostTable.

    Its arms decoded the same texts, so their median contexts differ only by where rounds start: the table holds the
    median of those medians as the context of all arms.

    Args:
        rows: result rows of op "round"; other ops and metrics are left out.

    Raises:
        ArgumentError: no round times among the rows.
        ComparisonError: rows of several calls.
    """
    times = rows[(rows["op"] == "round") & (rows["metric"] == "round_ms")]
    if times.empty:
        raise ArgumentError("rows", 'rows of op "round", metric "round_ms"', "none")
    if times["run_id"].nunique(dropna=False) > 1:
        raise ComparisonError(f"run_id: round times of {times['run_id'].nunique()} measurements, expected one")
    names = {"median": "round_ms", "p10": "round_ms_p10", "p90": "round_ms_p90"}
    kept = times.drop(columns=["value", "samples", "sample_prompts"]).rename(columns=names).reset_index(drop=True)
    return CostTable(kept.assign(context=round(float(times["context"].median()))))
