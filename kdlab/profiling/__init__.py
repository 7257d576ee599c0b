"""Profiling room: what the hardware's own counters say of a kernel."""

from kdlab.profiling.counters import COUNTERS, Counter, collect_counters

__all__ = ["COUNTERS", "Counter", "collect_counters"]
