"""Hardware counters of the kernels that a command marks, summed up by nobody: one value a launch and counter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kdlab.errors import KdlabError
from kdlab.profiling.ncu import number, read_csv, run_ncu

COUNTERS = {
    "duration": ("gpu__time_duration.sum", "ns", 1.0),
    "dram_read": ("dram__bytes_read.sum", "B", 1.0),
    "dram_write": ("dram__bytes_write.sum", "B", 1.0),
    "l2_read": ("lts__t_sectors_op_read.sum", "B", 32.0),
    "l1_read": ("l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum", "B", 1.0),
}
"""What is counted: name, the metric of Nsight Compute, and its unit after multiplying: a sector is 32 bytes. `l1_read`
counts what threads load, or copy with cp.async; bulk copies (TMA) pass it by."""

_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter of one kernel launch."""

    kernel: str
    name: str
    unit: str
    value: float


def collect_counters(
    command: Sequence[str], counters: Mapping[str, tuple[str, str, float]] = COUNTERS, *, timeout_s: float = _TIMEOUT_S
) -> list[Counter]:
    """Run a command under Nsight Compute and return the counters of every kernel that it marks.

    Args:
        command: a program and its arguments, see `run_ncu`.
        counters: name to (metric, unit, factor).
        timeout_s: the child and what it started are ended after that.

    Returns:
        One entry a launch and counter, in launch order; a counter that the GPU does not have is left out.

    Raises:
        UnsupportedDevice: there is no `ncu`, or it may not or cannot read counters here.
        KdlabError: the command failed, marked no kernel, or took too long.
    """
    metrics = [metric for metric, _, _ in counters.values()]
    table = run_ncu(command, metrics, options=["--target-processes", "all"], timeout_s=timeout_s)
    found = _counters(table, counters)
    if not found:
        raise KdlabError("hardware counters: the command launched no kernel after torch.cuda.profiler.start()")
    return found


def parse_counters(text: str, counters: Mapping[str, tuple[str, str, float]]) -> list[Counter]:
    """Read counters from what `ncu --csv --page raw` printed."""
    return _counters(read_csv(text), counters)


def _counters(table: Sequence[Mapping[str, str]], counters: Mapping[str, tuple[str, str, float]]) -> list[Counter]:
    found = []
    for row in table:
        for name, (metric, unit, factor) in counters.items():
            value = number(row.get(metric))
            if value is not None:
                found.append(Counter(row["Kernel Name"].partition("(")[0], name, unit, factor * value))
    return found
