"""What the hardware counts of each launch: a child process runs the work under Nsight Compute, in ranges of ours.

The child marks every piece of work with a range "case 0", "case 1" and so on around its stages, all of them inside the
range "profiled", and leaves a file that says which case is which. Nsight Compute counts what lies inside that range of
our domain alone, and tells the open ranges with every launch.
"""

import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from kdlab.errors import KdlabError
from kdlab.kernels.stage import observed
from kdlab.machine import gpu_state
from kdlab.profiling.launches import launches_frame
from kdlab.profiling.ncu import number, run_ncu
from kdlab.profiling.ranges import CASE, DOMAIN, PROFILED, NvtxRanges, place_of, without_layers
from kdlab.profiling.work import Work, columns_of, kernel_name, triple

SOURCE = "ncu"
METRICS = {
    "duration_us": ("gpu__time_duration.sum", 1e-3),
    "dram_read": ("dram__bytes_read.sum", 1.0),
    "dram_write": ("dram__bytes_write.sum", 1.0),
    "l2_read": ("lts__t_sectors_op_read.sum", 32.0),
    "tensor_pct": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 1.0),
    "sm_pct": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "dram_pct": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "tensor_flops": ("sm__ops_path_tensor_src_bf16_dst_fp32.sum", 1.0),
    "registers": ("launch__registers_per_thread", 1.0),
}
"""Columns of a launch: the metric of Nsight Compute in base units, and what it is multiplied by."""

_RANGES_COLUMN = "Push/Pop_Range"
_LATE_S = 20.0  # to end the stage under way, and for ncu to write what it has

Row = dict[str, Any]


def count_launches(command: Sequence[str], facts: Path, *, seconds: float) -> tuple[pd.DataFrame, list[str]]:
    """Run a command that calls `run_marked` under Nsight Compute.

    Args:
        command: a program and its arguments.
        facts: the file that it leaves.
        seconds: that the command was given; it is ended some time after them.

    Returns:
        The launches, of LAUNCHES_FORMAT, and what was cut.

    Raises:
        UnsupportedDevice: there is no `ncu`, or it may not or cannot read counters here.
        KdlabError: the command failed, launched nothing inside its ranges, or took too long.
    """
    filters = ["--target-processes", "application-only", "--nvtx", "--nvtx-include", f"{DOMAIN}@{PROFILED}/"]
    metrics = [metric for metric, _ in METRICS.values()]
    table = run_ncu(command, metrics, options=filters, timeout_s=seconds + _LATE_S)
    found = json.loads(facts.read_text()) if facts.exists() else {"works": [], "messages": []}
    rows, messages = launch_rows(table, found["works"]), [f"counters: {line}" for line in found["messages"]]
    if not rows and not messages:
        raise KdlabError(f"hardware counters: no kernel inside a range of the NVTX domain {DOMAIN!r}")
    return launches_frame(rows, found["provenance"], found["before"], found["after"]), messages


def launch_rows(table: Sequence[Mapping[str, str]], works: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the launches that lie inside ranges of ours as rows.

    Args:
        table: of `run_ncu`.
        works: columns of the work by number.
    """
    rows: list[Row] = []
    positions: dict[int, int] = {}
    for line in table:
        stack = nvtx_stack(line)
        number_of_case = next((int(name.removeprefix(CASE)) for name in stack if name.startswith(CASE)), None)
        if number_of_case is None:
            continue
        position = positions.get(number_of_case, 0)
        positions[number_of_case] = position + 1
        row = place_of(stack) | {"source": SOURCE, "mode": "eager", "repeat": 0, "position": position}
        row |= {"kernel": kernel_name(line["Kernel Name"])}
        row |= {"grid": triple(line.get("Grid Size")), "block": triple(line.get("Block Size"))}
        for name, (metric, factor) in METRICS.items():
            value = number(line.get(metric))
            row[name] = None if value is None else factor * value
        rows.append(row | dict(works[number_of_case]))
    return rows


def nvtx_stack(line: Mapping[str, str]) -> list[str]:
    """Return the names of our domain's open ranges at a launch, the outermost first, from a line of ncu's CSV."""
    texts = [text or "" for name, text in line.items() if name and _RANGES_COLUMN in name]
    return re.findall(rf'"{DOMAIN}:([^:"]*)', "  ".join(texts))


def run_marked(
    works: Iterable[Work], facts: Path, provenance: Mapping[str, Any], *, layers: bool, until: float
) -> None:
    """Run each piece of work once, after a warm-up, in ranges that `count_launches` finds; called in the child.

    Args:
        works: they are made one after another.
        facts: the file to leave.
        provenance: of the run.
        layers: mark the target's layers too.
        until: of `time.time()`; then no work begins, and no further stage of the work under way is counted.
    """
    ranges, before = NvtxRanges(), gpu_state()
    found: list[Row] = []
    messages: list[str] = []
    for work in works:
        if time.time() > until:
            messages.append(f"out of time: left out from {work.case}")
            break
        work.prepare()
        work.run()
        work.prepare()
        torch.cuda.synchronize()
        watch = _Watch(ranges, until)
        torch.cuda.profiler.start()
        with ranges(PROFILED), ranges(f"{CASE}{len(found)}"), observed(watch, without_layers(watch, layers)):
            work.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        found.append(columns_of(work))
        if watch.cut:
            messages.append(f"out of time: {work.case} is cut off from its stage {watch.cut!r}")
            break
    states = {"before": before, "after": gpu_state()}
    facts.write_text(json.dumps({"works": found, "provenance": dict(provenance), "messages": messages, **states}))


class _Watch:
    """Observer that pushes ranges, and ends the counting once it is late."""

    def __init__(self, ranges: NvtxRanges, until: float) -> None:
        self._ranges, self._until = ranges, until
        self.cut: str | None = None

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.cut is None and time.time() > self._until:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            self.cut = name
        within: AbstractContextManager[object] = self._ranges(name)
        with within:
            yield
