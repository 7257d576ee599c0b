"""Callables in, result rows out: the only room with timers."""

from kdlab.bench.rounds import Arm, cost_table, time_rounds
from kdlab.bench.rows import bench_row, read_rows, rows_frame, samples_frame, summarize_samples, write_rows

__all__ = [
    "Arm",
    "bench_row",
    "cost_table",
    "read_rows",
    "rows_frame",
    "samples_frame",
    "summarize_samples",
    "time_rounds",
    "write_rows",
]
