"""One arm run once for a profiler, `python -m kdlab.bench.kernels.counted OP ARM SIZES`, and its counters as rows."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from kdlab.bench.kernels.case import LATENT, ROPE, Case
from kdlab.bench.kernels.measured import to_frame
from kdlab.bench.kernels.suite import HEADS, cases_of
from kdlab.bench.rows import state_columns
from kdlab.bench.timing import require_gpu
from kdlab.errors import ArgumentError
from kdlab.machine import gpu_state
from kdlab.provenance import run_provenance

COUNTED_SIZES = {"streams": 1, "rows": 33, "prefix": 4096, "heads": 64}
COUNTED_ARMS = ("naive", "mma", "wgmma")
"""The largest size that the naive attention kernel is timed at, and who is compared with it."""


def counted_command(op: str, arm: str, sizes: Mapping[str, Any]) -> list[str]:
    """Return the command that runs one arm once, and marks it for Nsight Compute."""
    return [sys.executable, "-m", "kdlab.bench.kernels.counted", op, arm, json.dumps(dict(sizes))]


def counter_rows(op: str, sizes: Mapping[str, Any], counted: Mapping[str, Iterable[Any]]) -> pd.DataFrame:
    """Return counters as result rows: sums over the kernels of a call.

    Args:
        op, sizes: of the case.
        counted: for each arm the counters of its launches, as `kdlab.profiling.collect_counters` returns them.
    """
    rows = []
    for arm, counters in counted.items():
        sums: dict[tuple[str, str], float] = {}
        kernels: dict[str, None] = {}
        for counter in counters:
            sums[counter.name, counter.unit] = sums.get((counter.name, counter.unit), 0.0) + counter.value
            kernels[counter.kernel] = None
        places = {"streams": sizes["streams"], "rows": sizes["rows"], "context": sizes["prefix"]}
        shared = {"op": op, "case": dict(sizes), "impl": arm, "note": ", ".join(kernels), **places}
        rows += [{"metric": name, "unit": unit, "value": value, **shared} for (name, unit), value in sums.items()]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = gpu_state(device)
    return to_frame(rows, run_provenance(device=str(device), dtype="bfloat16"), state_columns(state, state))


def least_read_bytes(sizes: Mapping[str, Any]) -> int:
    """Return what one call of verify_attention must read at least: every key once, and every query."""
    rows = sizes["rows"] * sizes["heads"]
    return int(2 * sizes["streams"] * (LATENT + ROPE) * (sizes["prefix"] + sizes["rows"] + rows))


def run_once(op: str, arm: str, sizes: Mapping[str, Any]) -> None:
    """Run one arm of a case once after a warm-up, between the marks that a profiler waits for.

    Raises:
        UnsupportedDevice: no GPU.
        ArgumentError: there is no such case or arm.
    """
    require_gpu("counters")
    case = find_case(op, sizes)
    if arm not in case.arms:
        raise ArgumentError("arm", "one of " + ", ".join(case.arms), arm)
    chosen, inputs = case.arms[arm], case.make(0)
    if chosen.prepare:
        inputs = chosen.prepare(inputs)
    chosen.run(inputs)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    chosen.run(inputs)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def find_case(op: str, sizes: Mapping[str, Any]) -> Case:
    """Return the case of the benchmark that has these sizes.

    Raises:
        ArgumentError: there is none.
    """
    for case in cases_of(op, HEADS):
        if dict(case.sizes) == dict(sizes):
            return case
    raise ArgumentError("sizes", f"those of a case of {op}", dict(sizes))


def main(arguments: Sequence[str]) -> None:
    """Run `OP ARM SIZES`."""
    op, arm, sizes = arguments
    run_once(op, arm, json.loads(sizes))


if __name__ == "__main__":
    main(sys.argv[1:])
