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
from kdlab.profiling.work import Subject, Work, columns_of, kernel_name, triple

SOURCE = "ncu"
METRICS = {
    "duration_us": (("gpu__time_duration.sum",), 1e-3),
    "dram_read": (("dram__bytes_read.sum",), 1.0),
    "dram_write": (("dram__bytes_write.sum",), 1.0),
    "l2_read": (("lts__t_sectors_op_read.sum",), 32.0),
    "tensor_pct": (("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",), 1.0),
    "sm_pct": (("sm__cycles_active.avg.pct_of_peak_sustained_elapsed",), 1.0),
    "dram_pct": (
        ("dram__bytes_read.sum.pct_of_peak_sustained_elapsed", "dram__bytes_write.sum.pct_of_peak_sustained_elapsed"),
        1.0,
    ),
    "registers": (("launch__registers_per_thread",), 1.0),
    "tensor_flops": (("sm__ops_path_tensor_src_bf16_dst_fp32.sum",), 1.0),
}
"""Columns of a launch: metrics of Nsight Compute in base units, summed and multiplied. `l2_read` counts sectors of 32
bytes."""
MANY_PASSES = ("tensor_flops",)
"""Columns that make ncu run a kernel more often. Each time it restores the memory of the process: beside a slice of
K2.6 that took most of a second a launch on an H200, and less than a tenth without them."""

_RANGES_COLUMN = "Push/Pop_Range"
_LATE_S = 20.0  # to end the stage under way, and for ncu to write what it has

Row = dict[str, Any]
Placed = tuple[Row, int]


def count_launches(
    command: Sequence[str], facts: Path, *, seconds: float, columns: Sequence[str] = tuple(METRICS)
) -> tuple[pd.DataFrame, list[str]]:
    """Run a command that calls `run_marked` under Nsight Compute.

    Args:
        command: a program and its arguments.
        facts: the file that it leaves.
        seconds: that the command was given; it is ended some time after them.
        columns: of METRICS; without MANY_PASSES it takes much less time beside a model.

    Returns:
        The launches, of LAUNCHES_FORMAT, and what was cut.

    Raises:
        UnsupportedDevice: there is no `ncu`, or it may not or cannot read counters here.
        KdlabError: the command failed, launched nothing inside its ranges, or took too long.
    """
    filters = ["--target-processes", "application-only", "--nvtx", "--nvtx-include", f"{DOMAIN}@{PROFILED}/"]
    metrics = [metric for column in columns for metric in METRICS[column][0]]
    table = run_ncu(command, metrics, options=filters, timeout_s=seconds + _LATE_S)
    found = json.loads(facts.read_text()) if facts.exists() else {"works": [], "messages": [], "provenance": []}
    rows, messages = launch_rows(table, found["works"]), [f"counters: {line}" for line in found["messages"]]
    if not rows and not messages:
        raise KdlabError(f"hardware counters: no kernel inside a range of the NVTX domain {DOMAIN!r}")
    frames = [
        launches_frame([row for row, subject in rows if subject == place], provenance, found["before"], found["after"])
        for place, provenance in enumerate(found["provenance"])
    ]
    return pd.concat(frames, ignore_index=True) if frames else launches_frame([], {}), messages


def launch_rows(table: Sequence[Mapping[str, str]], works: Sequence[tuple[Mapping[str, Any], int]]) -> list[Placed]:
    """Return the launches that lie inside ranges of ours as rows, each with the number of its subject.

    Args:
        table: of `run_ncu`.
        works: by number, columns of the work and its subject.
    """
    rows: list[Placed] = []
    positions: dict[int, int] = {}
    for line in table:
        stack = nvtx_stack(line)
        case = next((int(name.removeprefix(CASE)) for name in stack if name.startswith(CASE)), None)
        if case is None:
            continue
        positions[case] = positions.get(case, -1) + 1
        row = place_of(stack) | {"source": SOURCE, "mode": "eager", "repeat": 0, "position": positions[case]}
        row |= {"kernel": kernel_name(line["Kernel Name"])}
        row |= {"grid": triple(line.get("Grid Size")), "block": triple(line.get("Block Size"))}
        for name, (metrics, factor) in METRICS.items():
            values = [value for metric in metrics if (value := number(line.get(metric))) is not None]
            row[name] = factor * sum(values) if len(values) == len(metrics) else None
        columns, subject = works[case]
        rows.append((row | dict(columns), subject))
    return rows


def nvtx_stack(line: Mapping[str, str]) -> list[str]:
    """Return the names of our domain's open ranges at a launch, the outermost first, from a line of ncu's CSV."""
    texts = [text or "" for name, text in line.items() if name and _RANGES_COLUMN in name]
    return re.findall(rf'"{DOMAIN}:([^:"]*)', "  ".join(texts))


def run_marked(subjects: Iterable[Subject], facts: Path, *, layers: bool, until: float) -> None:
    """Run each piece of work once, after a warm-up, in ranges that `count_launches` finds; called in the child.

    Args:
        subjects: their first pieces of work come first, then their second ones, and so on.
        facts: the file to leave.
        layers: mark the target's layers too.
        until: of `time.time()`; then no work begins, and no further stage of the work under way is counted.
    """
    ranges, before, chosen = NvtxRanges(), gpu_state(), list(subjects)
    found: list[tuple[Row, int]] = []
    messages: list[str] = []
    for subject, work in _in_turns([each.works for each in chosen]):
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
        found.append((columns_of(work), subject))
        if watch.cut:
            messages.append(f"out of time: {work.case} is cut off from its stage {watch.cut!r}")
            break
    states = {"before": before, "after": gpu_state()}
    provenance = [dict(each.provenance) for each in chosen]
    facts.write_text(json.dumps({"works": found, "provenance": provenance, "messages": messages, **states}))


def _in_turns(lists: Sequence[Iterable[Work]]) -> Iterator[tuple[int, Work]]:
    """Return the first piece of each list with the list's number, then the second of each, and so on."""
    running = [(place, iter(works)) for place, works in enumerate(lists)]
    while running:
        left = []
        for place, works in running:
            for work in works:
                yield place, work
                left.append((place, works))
                break
        running = left


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
