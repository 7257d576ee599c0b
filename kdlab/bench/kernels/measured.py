"""Measured kernels as result rows.

Rows of one case share `op` and `case` (its sizes as JSON). Metrics: `time_us`, one row an arm and mode, samples kept
(`impl` names the arm, `graph` is "graph", "graph, warm cache": one buffer set over and over, or "eager"); `floor_us`,
the case's bound by the ceilings of the same run; `goal_us` (`impl` names the arm that it is about); `relative_error`,
an arm's worst row against float64; for arms that give integers, the share of wrong ones. Ceilings have op "ceiling"
and metric "rate" or "time_us".
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kdlab.bench.kernels.case import Arm, Case
from kdlab.bench.kernels.ceilings import Ceiling, Ceilings
from kdlab.bench.kernels.goals import goal_us, mma_goal_us
from kdlab.bench.rows import bench_row, rows_frame, summarize_samples
from kdlab.kernels.cost import Cost

Row = dict[str, Any]
"""Arguments of `bench_row`, without the provenance."""

GRAPH, WARM, EAGER = "graph", "graph, warm cache", "eager"


def time_row(case: Case, name: str, arm: Arm, samples: Sequence[float], mode: str, *, warm: bool) -> Row:
    """One arm's times; `method` says whether it is kdlab's own or a peer, the note if the cache held its inputs."""
    method, note = "own" if arm.own else "peer", "inputs in the L2 cache" if warm else None
    rounded = [round(sample, 3) for sample in samples]
    return _row(case, "time_us", "us", samples=rounded, impl=name, method=method, graph=mode, note=note)


def error_row(case: Case, name: str, arm: Arm, error: float) -> Row:
    """One arm's error in a check; an infinite one stands as a very large one."""
    method, value = "own" if arm.own else "peer", min(error, 1e30)
    return _row(case, "relative_error", "1", value=value, impl=name, method=method)


def ceiling_row(ceiling: Ceiling) -> Row:
    """One ceiling of the card."""
    metric = "time_us" if ceiling.unit == "us" else "rate"
    columns: Row = {"metric": metric, "unit": ceiling.unit, "samples": ceiling.samples, "graph": GRAPH}
    return {"op": "ceiling", "case": {"of": ceiling.name, "what": ceiling.what}, **columns}


def bound_rows(
    costs: Sequence[tuple[Case, Cost]], rows: Sequence[Row], ceilings: Ceilings, *, goals: bool
) -> list[Row]:
    """The bound of every timed case and, with `goals`, what the design wants of its arms.

    Args:
        costs: of the cases that were timed.
        rows: their times, which some goals are relative to.
        ceilings: of the same run.
        goals: whether this is the card that they are set for.
    """
    medians = {
        (row["op"], _key(row["case"]), row["impl"]): summarize_samples(row["samples"])["median"]
        for row in rows
        if row["metric"] == "time_us" and row["op"] != "ceiling" and row["graph"] == GRAPH
    }

    def median(op: str, sizes: Mapping[str, Any], arm: str) -> float | None:
        return medians.get((op, _key(sizes), arm))

    found = []
    for case, cost in costs:
        found.append(_row(case, "floor_us", "us", value=ceilings.floor_us(cost)))
        wanted = {"mma": mma_goal_us(case.op, case.sizes, cost.flops, ceilings.mma_flops_per_s)}
        wanted |= {name: goal_us(case.op, case.sizes, cost, median) for name, arm in case.arms.items() if arm.goal}
        found += [_row(case, "goal_us", "us", value=us, impl=name) for name, us in wanted.items() if goals and us]
    return found


def _key(sizes: Mapping[str, Any]) -> str:
    return json.dumps(dict(sizes), sort_keys=True)


def _row(case: Case, metric: str, unit: str, **columns: Any) -> Row:
    sizes = case.sizes
    places = {"streams": sizes.get("streams"), "rows": sizes.get("rows"), "context": sizes.get("prefix")}
    return {"op": case.op, "metric": metric, "unit": unit, "case": dict(sizes), **places, **columns}


def to_frame(rows: Sequence[Row], provenance: Mapping[str, Any], state: Mapping[str, Any]) -> pd.DataFrame:
    """Return rows of one run as a table of ROWS_FORMAT.

    Args:
        rows: of this module.
        provenance: of the run.
        state: clock and temperature columns.
    """
    return rows_frame([bench_row(**row, provenance=provenance, **state) for row in rows])
