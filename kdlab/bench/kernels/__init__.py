"""The kernel benchmark: kdlab's CUDA ops beside their peers, at Kimi K2.6's sizes, against what the card can do."""

from kdlab.bench.kernels.runner import WHOLE_SECONDS, KernelBench, bench_kernels
from kdlab.bench.kernels.suite import HEADS, OPS
from kdlab.bench.kernels.table import case_text, kernel_table, verdict_lines

__all__ = [
    "HEADS",
    "OPS",
    "WHOLE_SECONDS",
    "KernelBench",
    "bench_kernels",
    "case_text",
    "kernel_table",
    "verdict_lines",
]
