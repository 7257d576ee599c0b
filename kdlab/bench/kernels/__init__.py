"""The kernel benchmark: kdlab's CUDA ops beside their peers, at Kimi K2.6's sizes, against what the card can do."""

from kdlab.bench.kernels.counted import COUNTED_ARMS, COUNTED_SIZES, counted_command, counter_rows, least_read_bytes
from kdlab.bench.kernels.runner import WHOLE_SECONDS, KernelBench, bench_kernels
from kdlab.bench.kernels.suite import HEADS, OPS
from kdlab.bench.kernels.table import (
    case_text,
    case_words,
    compare_runs,
    error_table,
    graph_times,
    kernel_table,
    representative_cases,
    verdict_lines,
    with_other_modes,
)

__all__ = [
    "COUNTED_ARMS",
    "COUNTED_SIZES",
    "HEADS",
    "OPS",
    "WHOLE_SECONDS",
    "KernelBench",
    "bench_kernels",
    "case_text",
    "case_words",
    "compare_runs",
    "counted_command",
    "counter_rows",
    "error_table",
    "graph_times",
    "kernel_table",
    "least_read_bytes",
    "representative_cases",
    "verdict_lines",
    "with_other_modes",
]
