"""Measured round times, and their quotient with recorded acceptance: tokens per second and speedup over AR."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study.bootstrap import ratio
from kdlab.study.compare import ACCEPTANCE_FIELDS, COST_FIELDS, check_table

COST_COLUMNS = (
    "method",
    "setting",
    "rows",
    "round_ms",
    "round_ms_p10",
    "round_ms_p90",
    "context",
    "streams",
    "device",
)

# Methods that build and verify alike, so that one may lend the other its times at other row counts.
_FAMILY = {"chain": "chain", "adaptive_chain": "chain", "ddtree": "tree", "beam": "tree", "ar": "ar"}
Times = tuple[float, float, float, str]  # median, p10, p90 in milliseconds; "measured", "interpolated" or "none"
RoundMs = Callable[[str, float, int], Times]  # (method, setting, rows)
_UNKNOWN: Times = (float("nan"), float("nan"), float("nan"), "none")


@dataclass(frozen=True, eq=False)
class CostTable:
    """Round times measured under one set of conditions.

    Attributes:
        rows: one row an arm, with at least `COST_COLUMNS`: method, setting (budget, chain length or beam width), rows
            (verified a stream), round_ms (median of a whole round of all streams, milliseconds) with _p10 and _p90,
            context (prefix rows), streams and device; any column of `COST_FIELDS` and the flag `simulated` besides.

    Raises:
        ArgumentError: a column is missing, there is no row, an arm comes twice or a time is not positive.
        ComparisonError: rows were measured under different conditions; the differing field is named.
    """

    rows: pd.DataFrame

    def __post_init__(self) -> None:
        if not isinstance(self.rows, pd.DataFrame):
            raise ArgumentError("cost rows", "a table", type(self.rows).__name__)
        missing = [name for name in COST_COLUMNS if name not in self.rows.columns]
        if missing:
            raise ArgumentError("cost rows", f"columns {', '.join(missing)}", ", ".join(map(str, self.rows.columns)))
        if self.rows.empty:
            raise ArgumentError("cost rows", "at least one row", "none")
        check_table(self.rows, fields=(*COST_FIELDS, "simulated"))
        twice = self.rows.duplicated(["method", "setting"])
        if twice.any():
            arm = self.rows.loc[twice, ["method", "setting"]].iloc[0].tolist()
            raise ArgumentError("cost rows", "one row an arm", f"{arm} more than once")
        times = pd.to_numeric(self.rows["round_ms"], errors="coerce")
        if not ((times > 0) & (times < np.inf)).all():
            raise ArgumentError("cost rows", "a finite round_ms above 0", self.rows["round_ms"].tolist())

    @property
    def streams(self) -> int:
        """S, the streams that every measured round served."""
        return int(self.rows["streams"].iloc[0])

    @property
    def simulated(self) -> bool:
        """True where the times belong to no real run (random weights, modelled parts)."""
        return "simulated" in self.rows.columns and bool(self.rows["simulated"].iloc[0])

    def round_ms(self, method: str, setting: float, rows: int, *, interpolate: bool = False) -> Times:
        """Time of a round of one arm.

        Args:
            method, setting: the arm; an adaptive chain's round is a chain round of its rows, whatever the threshold.
            rows: rows verified.
            interpolate: where the arm was not measured, interpolate linearly over the rows of the same family (chain
                and adaptive chain, tree and beam) inside the measured range; a chain shorter than the shortest
                measured costs as much as that one.

        Returns:
            (median, p10, p90, source) in milliseconds; source is "measured", "interpolated" or "none" (NaN times).

        Raises:
            ComparisonError: the arm was measured with another number of rows.
        """
        if method == "adaptive_chain":
            method, setting = "chain", rows - 1
        arm = self.rows[(self.rows["method"] == method) & (self.rows["setting"] == setting)]
        if len(arm):
            measured = arm.iloc[0]
            if measured["rows"] != rows:
                raise ComparisonError(f"rows: {method} {setting:g} verifies {rows}, its time is of {measured['rows']}")
            median, p10, p90 = (float(measured[name]) for name in ("round_ms", "round_ms_p10", "round_ms_p90"))
            return median, p10, p90, "measured"
        return self._interpolated(method, rows) if interpolate else _UNKNOWN

    def _interpolated(self, method: str, rows: int) -> Times:
        family = self.rows[self.rows["method"].map(_FAMILY) == _FAMILY.get(method, method)].sort_values("rows")
        known = family["rows"].to_numpy(dtype=np.float64)
        too_short = len(known) and rows < known[0] and method != "chain"
        if not len(known) or rows > known[-1] or too_short:
            return _UNKNOWN
        names = ("round_ms", "round_ms_p10", "round_ms_p90")
        median, p10, p90 = (float(np.interp(rows, known, family[name])) for name in names)
        return median, p10, p90, "interpolated"


def speed(
    acceptance: pd.DataFrame, cost: CostTable, *, interpolate: bool = False, mixed: bool = False
) -> pd.DataFrame:
    """Divide recorded acceptance by measured cost, arm by arm.

    Args:
        acceptance: result of `summarize` with "method" and "setting" among its groups.
        cost: measured round times.
        interpolate: allow times that were not measured, see `CostTable.round_ms`; those arms are marked.
        mixed: allow acceptance and cost of different pairs, prompts or settings; every row is then marked simulated.

    Returns:
        `acceptance` with round_ms, round_ms_p10, round_ms_p90 (mean over the arm's rounds; p10 and p90 NaN where rounds
        differ in rows), cost_source ("measured", "interpolated", "none"), device, streams, context, tok_s_per_stream,
        tok_s (all streams) and speedup over the AR row of the same group; NaN where a time or that row is missing.

    Raises:
        ArgumentError: columns are missing.
        ComparisonError: rows of `acceptance` differ in provenance, or `acceptance` and `cost` do, where both know it.
    """
    missing = [name for name in ("method", "setting", "rounds_by_rows") if name not in acceptance.columns]
    if missing:
        raise ArgumentError("acceptance", f"columns {', '.join(missing)} (see summarize)", list(acceptance.columns))
    table = acceptance.copy().reset_index(drop=True)
    check_table(table)
    if not mixed:
        check_halves(table, cost)
    round_ms = partial(cost.round_ms, interpolate=interpolate)
    arms = zip(table["method"], table["setting"], table["rounds_by_rows"], strict=True)
    times = [arm_cost(round_ms, method, setting, by_rows) for method, setting, by_rows in arms]
    names = ("round_ms", "round_ms_p10", "round_ms_p90", "cost_source")
    table[list(names)] = pd.DataFrame(times, columns=list(names), index=table.index)
    for name in ("device", "streams", "context"):
        table[name] = cost.rows[name].iloc[0]
    table["tok_s_per_stream"] = 1000.0 * table["tokens_per_round"] / table["round_ms"]
    table["tok_s"] = table["tok_s_per_stream"] * cost.streams
    table["simulated"] = table.get("simulated", False) | cost.simulated | mixed
    return _with_speedup(table)


def check_halves(acceptance: pd.DataFrame, cost: CostTable) -> None:
    """Refuse acceptance and cost that differ in a field both know.

    Raises:
        ComparisonError: the differing field is named.
    """
    shared = [name for name in ACCEPTANCE_FIELDS if name in acceptance.columns and name in cost.rows.columns]
    both = pd.concat([acceptance[shared].head(1), cost.rows[shared].head(1)])
    known = [name for name in shared if both[name].notna().all()]
    check_table(both, fields=known)


def arm_cost(round_ms: RoundMs, method: str, setting: float, rounds_by_rows: Mapping[Any, int]) -> Times:
    """Average the times of an arm's rounds.

    Args:
        round_ms: `CostTable.round_ms`.
        method, setting: the arm.
        rounds_by_rows: number of rounds by verified rows.

    Returns:
        Mean of the medians, p10, p90 (NaN twice where rounds differ in rows) in milliseconds, and the weakest source.
    """
    parts = [(count, round_ms(method, setting, int(rows))) for rows, count in rounds_by_rows.items()]
    if not parts:
        return _UNKNOWN
    sources = [times[3] for _, times in parts]
    source = next(name for name in ("none", "interpolated", "measured") if name in sources)
    if len(parts) == 1:
        return parts[0][1]
    counts = np.array([count for count, _ in parts], dtype=np.float64)
    medians = np.array([times[0] for _, times in parts], dtype=np.float64)
    return float(counts @ medians / counts.sum()), float("nan"), float("nan"), source


def _with_speedup(table: pd.DataFrame) -> pd.DataFrame:
    """Add speedup over the AR row that shares the kind of text and every other condition."""
    keys = ["kind"] if "kind" in table.columns else []
    plain = table[table["method"] == "ar"]
    if keys:
        reference = table["kind"].map(plain.set_index("kind")["tok_s"])
    else:
        reference = pd.Series(plain["tok_s"].iloc[0] if len(plain) else float("nan"), index=table.index)
    table["speedup"] = ratio(table["tok_s"].to_numpy(dtype=float), reference.fillna(0).to_numpy(dtype=float))
    return table
