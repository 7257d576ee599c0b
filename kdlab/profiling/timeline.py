"""When each kernel of a round ran: torch.profiler's trace of eager and of captured rounds, read launch by launch.

An eager launch belongs to the stage in which the host called for it: the call and its kernel carry the same
correlation number. A captured round is one call for all its kernels. Those of one name run in the order of the eager
ones, also where a graph has branches, so when there are as many of each name, the stages are taken from there; when
not, the stages stay empty and a message says so. On a machine without a GPU the outermost operations of torch stand for
the kernels.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from kdlab.kernels.stage import observed
from kdlab.machine import gpu_state
from kdlab.profiling.launches import launches_frame
from kdlab.profiling.ranges import Range, open_ranges, place_of, without_layers
from kdlab.profiling.work import Work, columns_of, kernel_name, triple

SOURCE = "torch.profiler"
_MARK, _REPEAT = "kdlab:", "repeat "
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_PLAIN_TIMES = 3
_EAGER_REPEATS = 2  # its launches are some fifty times slower to read than a graph's

Row = dict[str, Any]
Event = Mapping[str, Any]


@dataclass(slots=True)
class _Timeline:
    """Launches as rows for `launches_frame`, and what there is to say about them."""

    rows: list[Row] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def profile_timeline(
    works: Iterable[Work],
    provenance: Mapping[str, Any],
    *,
    repeats: int = 5,
    layers: bool = False,
    seconds: float = 60.0,
) -> tuple[pd.DataFrame, list[str]]:
    """Trace work eagerly and, on a GPU where it can be captured, as a CUDA graph.

    The profiler slows what it watches: a message tells the time of a run with and without it, without it from the
    host's call on, as no more can be seen then. It cannot work while another tool (ncu, nsys) holds the GPU's profiling
    interface.

    Args:
        works: from `kdlab.bench.profiled`, for example.
        provenance: of the run.
        repeats: runs that are kept, after one that is not.
        layers: note the target's layer of each launch too.
        seconds: no work begins after it.

    Returns:
        The launches, of LAUNCHES_FORMAT, and what there is to say of them.
    """
    found, begin, before = _Timeline(), time.monotonic(), gpu_state()
    if not torch.cuda.is_available():
        found.messages.append("timeline: no GPU here; these are the CPU's times, of torch's outermost operations")
    for work in works:
        if time.monotonic() - begin > seconds:
            found.messages.append(f"timeline: out of time, left out from {work.case}")
            break
        _profile_work(work, repeats, layers, found)
    return launches_frame(found.rows, provenance, before, gpu_state()), found.messages


def _profile_work(work: Work, repeats: int, layers: bool, found: _Timeline) -> None:
    work.prepare()
    work.run()
    eager = _traced(work, work.run, min(repeats, _EAGER_REPEATS), layers, found, "eager")
    if work.capture is None or not torch.cuda.is_available():
        return
    replay = work.capture()
    graph = _traced(work, replay, repeats, layers, found, "graph")
    for rows in graph.values():
        _take_places(rows, next(iter(eager.values()), []), work.case, found)


def _traced(
    work: Work, call: Callable[[], object], repeats: int, layers: bool, found: _Timeline, mode: str
) -> dict[int, list[Row]]:
    """Trace a call, and add its rows to what was found."""
    work.prepare()
    plain_us = _plain_us(call)
    work.prepare()
    by_repeat = read_trace(_trace(call, repeats + 1, layers))
    by_repeat = {repeat - 1: rows for repeat, rows in by_repeat.items() if repeat > 0}
    if not by_repeat:
        found.messages.append(f"timeline: {work.case}, {mode}: torch.profiler saw no kernel")
        return {}
    for repeat, rows in by_repeat.items():
        for row in rows:
            row |= {"source": SOURCE, "mode": mode, "repeat": repeat, **columns_of(work)}
        found.rows += rows
    spans = [max(row["start_us"] + row["duration_us"] for row in rows) for rows in by_repeat.values()]
    times = f"{statistics.median(spans):.0f} us from the first launch to the end of the last, watched"
    found.messages.append(f"timeline: {work.case}, {mode}: {times}; {plain_us:.0f} us from the call on, unwatched")
    return by_repeat


def _take_places(rows: Sequence[Row], eager: Sequence[Row], case: str, found: _Timeline) -> None:
    """Give a graph's launches the stages of the eager ones, if they are the same kernels, equally many of each."""
    rows, eager = (sorted(launches, key=lambda row: str(row["kernel"])) for launches in (rows, eager))
    if [row["kernel"] for row in rows] == [row["kernel"] for row in eager]:
        for row, other in zip(rows, eager, strict=True):
            row |= {name: other[name] for name in ("stage", "layer", "phase") if name in other}
        return
    message = f"timeline: {case}: {len(rows)} launches in the graph, {len(eager)} eager ones, not the same kernels"
    if f"{message}: no stages" not in found.messages:
        found.messages.append(f"{message}: no stages")


def _trace(call: Callable[[], object], times: int, layers: bool) -> list[Event]:
    from torch.profiler import ProfilerActivity, profile, record_function

    def mark(name: str) -> AbstractContextManager[object]:
        return record_function(_MARK + name)

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    # `acc_events` keeps torch from warning of further cycles: there is one.
    watching = profile(activities=activities, acc_events=True)
    with watching as profiler, observed(mark, without_layers(mark, layers)):
        for repeat in range(times):
            with mark(f"{_REPEAT}{repeat}"):
                call()
        _wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return events


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _plain_us(call: Callable[[], object]) -> float:
    """Return the median microseconds of a run that nothing watches, from call to end."""
    times = []
    for _ in range(_PLAIN_TIMES):
        _wait()
        begin = time.perf_counter()
        call()
        _wait()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def read_trace(events: Sequence[Event]) -> dict[int, list[Row]]:
    """Return the launches in a Chrome trace of torch.profiler by repetition, in the order of their starts.

    Args:
        events: `traceEvents`; kdlab's marks are user annotations that begin with "kdlab:".

    Returns:
        Rows with position, stage, kernel, start_us, duration_us, grid, block, registers, and layer and phase where the
        marks say so. What no repetition called for is left out.
    """
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(_MARK)]
    gpu = [event for event in events if event.get("cat") in _GPU_WORK]
    if any(event.get("cat") in _CALLS for event in events) or gpu:
        calls = {event["args"]["correlation"]: event for event in events
                 if event.get("cat") in _CALLS and "correlation" in event.get("args", {})}  # fmt: skip
        numbers = [(event, event["args"].get("correlation")) for event in gpu]
        pairs = [(event, calls[number]) for event, number in numbers if number in calls]
    else:
        pairs = [(event, event) for event in _outermost(events)]
    pairs.sort(key=lambda pair: pair[0]["ts"])
    ranges = [Range(mark["tid"], mark["ts"], mark["ts"] + mark["dur"], mark["name"].removeprefix(_MARK))
              for mark in marks]  # fmt: skip
    stacks = open_ranges(ranges, [(call["tid"], call["ts"]) for _, call in pairs])
    found: dict[int, list[Row]] = {}
    for (event, _), stack in zip(pairs, stacks, strict=True):
        if not stack or not stack[0].startswith(_REPEAT):
            continue
        rows = found.setdefault(int(stack[0].removeprefix(_REPEAT)), [])
        rows.append(_row(event, stack[1:], len(rows)))
    for rows in found.values():
        first = rows[0]["start_us"]
        for row in rows:
            row["start_us"] -= first
    return found


def _row(event: Event, stack: list[str], position: int) -> Row:
    facts = event.get("args", {})
    return place_of(stack) | {
        "position": position,
        "kernel": kernel_name(event["name"]) if event.get("cat") == "kernel" else event["name"],
        "start_us": float(event["ts"]),
        "duration_us": float(event["dur"]),
        "grid": triple(facts.get("grid")),
        "block": triple(facts.get("block")),
        "registers": facts.get("registers per thread"),
    }


def _outermost(events: Sequence[Event]) -> list[Event]:
    """Return torch's operations that lie inside no other one."""
    found: list[Event] = []
    ends: dict[object, float] = {}
    for event in sorted((event for event in events if event.get("cat") == "cpu_op"), key=lambda e: e["ts"]):
        if event["ts"] >= ends.get(event["tid"], 0.0):
            found.append(event)
            ends[event["tid"]] = event["ts"] + event["dur"]
    return found
