"""Profiling room: what the hardware's own counters say of a kernel, and which kernels a round launches."""

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
    write_launches,
)

__all__ = [
    "COUNTERS",
    "LAUNCHES_FORMAT",
    "MODES",
    "PHASES",
    "SOURCES",
    "SUBJECTS",
    "Counter",
    "collect_counters",
    "launches_frame",
    "load_nsight",
    "phase_of",
    "write_launches",
]
