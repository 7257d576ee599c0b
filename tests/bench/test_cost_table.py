"""Timed rounds as a CostTable: medians and percentiles carried over, one context, one measurement."""

import pytest

from kdlab.bench import bench_row, cost_table, rows_frame
from kdlab.errors import ArgumentError, ComparisonError


def timed(method, setting, samples, *, run_id="a", context=60):
    provenance = {"run_id": run_id, "device": "cpu", "streams": 1, "dtype": "float32"}
    columns = {"method": method, "setting": setting, "budget": setting, "rows": setting + 1, "context": context}
    common = {"provenance": provenance, "case": {}, "samples": samples, "sample_prompts": [0] * len(samples)}
    return [
        bench_row("round", "round_ms", "ms", **common, **columns),
        bench_row("round", "tokens_per_s", "tokens/s", **common, **columns),
    ]


def test_times_and_their_spread_are_carried_over():
    rows = rows_frame([*timed("ar", 0, [1.0, 2.0, 3.0]), *timed("ddtree", 7, [4.0, 4.0], context=62)])
    cost = cost_table(rows)
    assert cost.round_ms("ar", 0, 1) == (2.0, pytest.approx(1.2), pytest.approx(2.8), "measured")
    assert cost.round_ms("ddtree", 7, 8)[0] == 4.0
    assert cost.rows["context"].tolist() == [61, 61]
    assert len(cost.rows) == 2


def test_rows_of_two_measurements_or_of_none_are_refused():
    two = rows_frame([*timed("ar", 0, [1.0]), *timed("ddtree", 7, [2.0], run_id="b")])
    with pytest.raises(ComparisonError, match="run_id"):
        cost_table(two)
    with pytest.raises(ArgumentError, match="round_ms"):
        cost_table(two[two["metric"] == "tokens_per_s"])
