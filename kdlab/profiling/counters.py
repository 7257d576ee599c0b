"""Hardware counters of kernels: Nsight Compute as a child process, its CSV read back.

A command runs under `ncu` and marks with `torch.cuda.profiler.start()` where counting begins. Counting replays every
kernel several times with flushed caches and its own pace, so nothing is timed for a comparison here.
"""

import csv
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kdlab.errors import KdlabError, UnsupportedDevice

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
_FIXES = {
    "ERR_NVGPUCTRPERM": "this user may not read the counters (the driver's NVreg_RestrictProfilingToAdminUsers)",
    "LibraryNotLoaded": "Nsight Compute finds no profiling library on this machine",
}


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
        command: a program and its arguments.
        counters: name to (metric, unit, factor).
        timeout_s: the child and what it started are ended after that.

    Returns:
        One entry a launch and counter, in launch order; a counter that the GPU does not have is left out.

    Raises:
        UnsupportedDevice: there is no `ncu`, or it may not or cannot read counters here.
        KdlabError: the command failed, marked no kernel, or took too long.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise UnsupportedDevice("hardware counters: Nsight Compute (`ncu`) is not on the PATH")
    metrics = ",".join(metric for metric, _, _ in counters.values())
    options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--metrics", metrics]
    whole = [ncu, *options, "--profile-from-start", "off", "--target-processes", "all", *command]
    status, text = _run(whole, timeout_s)
    for sign, meaning in _FIXES.items():
        if sign in text:
            raise UnsupportedDevice(f"hardware counters: {meaning}")
    if status:
        said = [line for line in text.strip().splitlines() if not line.startswith("==PROF==")]
        own = [line for line in said if not line.startswith("==")]  # the program's last words say more than ncu's
        last = (own or said or ["no output"])[-1]
        raise KdlabError(f"hardware counters: ncu ended with status {status}: {last}")
    found = parse_counters(text, counters)
    if not found:
        raise KdlabError("hardware counters: the command launched no kernel after torch.cuda.profiler.start()")
    return found


def parse_counters(text: str, counters: Mapping[str, tuple[str, str, float]]) -> list[Counter]:
    """Read what `ncu --csv --page raw` prints: the program's own output, names, units, then one line a launch."""
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith('"ID",')), None)
    if first is None:
        return []
    table = list(csv.DictReader(line for line in lines[first:] if line.startswith('"')))
    found = []
    for row in table[1:]:  # the first is the units
        for name, (metric, unit, factor) in counters.items():
            value = _number(row.get(metric))
            if value is not None:
                found.append(Counter(row["Kernel Name"].partition("(")[0], name, unit, factor * value))
    return found


def _run(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Run in a session of its own, so that a late one can be ended with all that it started."""
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        text, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise KdlabError(f"hardware counters: it took longer than {timeout_s:g} s under ncu") from late
    return child.returncode, text


def _number(text: str | None) -> float | None:
    """The number in a cell, whose thousands are separated; None where the GPU has no such counter."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
