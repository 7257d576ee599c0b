"""Profiling room: what the hardware's own counters say of a kernel, and which kernels a round launches."""

from kdlab.profiling.counted import count_launches, run_marked
from kdlab.profiling.counters import COUNTERS, Counter, collect_counters
from kdlab.profiling.launches import (
    LAUNCHES_FORMAT,
    MODES,
    PHASES,
    SOURCES,
    SUBJECTS,
    launches_frame,
    load_nsight,
    phase_of,
    rows_beside,
    write_launches,
)
from kdlab.profiling.nsys import read_nsys
from kdlab.profiling.profile import profile_kernels, profile_rounds
from kdlab.profiling.ranges import nvtx_ranges
from kdlab.profiling.round_tables import (
    CALLS,
    calls_as_round,
    counted_case,
    kernel_use,
    middle_round,
    middle_times,
    round_times,
    stage_shares,
    stage_traffic,
    timelines,
)
from kdlab.profiling.summary import summary_lines, summary_table
from kdlab.profiling.timeline import profile_timeline
from kdlab.profiling.work import Subject, Work

__all__ = [
    "CALLS",
    "COUNTERS",
    "LAUNCHES_FORMAT",
    "MODES",
    "PHASES",
    "SOURCES",
    "SUBJECTS",
    "Counter",
    "Subject",
    "Work",
    "calls_as_round",
    "collect_counters",
    "count_launches",
    "counted_case",
    "kernel_use",
    "launches_frame",
    "load_nsight",
    "middle_round",
    "middle_times",
    "nvtx_ranges",
    "phase_of",
    "profile_kernels",
    "profile_rounds",
    "profile_timeline",
    "read_nsys",
    "round_times",
    "rows_beside",
    "run_marked",
    "stage_shares",
    "stage_traffic",
    "summary_lines",
    "summary_table",
    "timelines",
    "write_launches",
]
