"""Result rows of benchmarks that never ran, for what reads and draws them."""

import pandas as pd

from kdlab.bench.kernels import COUNTED_SIZES, counter_rows
from kdlab.bench.kernels.case import Arm, Case
from kdlab.bench.kernels.ceilings import Ceiling, Ceilings
from kdlab.bench.kernels.measured import EAGER, GRAPH, WARM, bound_rows, ceiling_row, error_row, time_row, to_frame
from kdlab.bench.rows import bench_row, rows_frame
from kdlab.kernels.cost import Cost
from kdlab.profiling import Counter
from tests.golden.make_parquet_v1 import PROVENANCE

CEILINGS = Ceilings((
    Ceiling("copy", "TB/s", [4.2, 4.25], "a copy"),
    Ceiling("read", "TB/s", [4.0, 4.0], "a read"),
    Ceiling("matrix", "TFLOP/s", [800.0, 800.0], "a product"),
    Ceiling("mma.sync", "TFLOP/s", [600.0], "instructions"),
    Ceiling("launch", "us", [1.0, 1.1], "a kernel"),
))  # fmt: skip
"""Of a made-up card of 4 TB/s and 800 TFLOP/s."""

_OWN, _GOAL, _PEER = Arm(print, print), Arm(print, print, goal=True), Arm(print, print, own=False)
_HOST = Arm(print, print, graph=False, own=False)
_ATTENTION = {"wgmma": _GOAL, "mma": _OWN, "naive": _OWN, "flashmla prefix": _PEER}
_CASES = (
    ("verify_attention", {"streams": 1, "rows": 33, "prefix": 256, "heads": 64}, _ATTENTION, (12, 15, 200, 18), 1.5),
    ("verify_attention", {"streams": 1, "rows": 33, "prefix": 1024, "heads": 64}, _ATTENTION, (18, 24, 900, 24), 6),
    ("verify_attention", {"streams": 1, "rows": 33, "prefix": 4096, "heads": 64}, _ATTENTION, (40, 60, 8600, 50), 24),
    ("verify_attention", {"streams": 1, "rows": 33, "prefix": 4096, "heads": 8}, {"wgmma": _GOAL}, (9,), 3),
    ("verify_attention", {"streams": 8, "rows": 33, "prefix": 4096, "heads": 8}, {"wgmma": _GOAL}, (40,), 24),
    ("draft_topk", {"streams": 1, "rows": 15, "vocab": 163840, "k": 64}, {"cuda": _GOAL, "torch": _PEER},
     (7, 130), 1.2),
    ("tree_build", {"streams": 1, "budget": 64, "draft": "peaked", "depth": 15, "k": 64},
     {"cuda": _GOAL, "host heap": _HOST}, (7, 700), 0.1),
    ("tree_build", {"streams": 1, "budget": 256, "draft": "peaked", "depth": 15, "k": 64}, {"cuda": _GOAL}, (14,), 0.1),
    ("tree_accept", {"streams": 8, "rows": 64, "depth": 15}, {"cuda": _GOAL}, (2,), 0.1),
    ("moe_int4", {"streams": 1, "rows": 33, "width": 2048, "shared": False, "routing": "uniform"}, {"cuda": _GOAL},
     (1200,), 1000),
)  # fmt: skip
"""Op, sizes, arms, microseconds of each arm, and the bound; one goal of eight is missed."""


def kernel_rows() -> pd.DataFrame:
    """Return made-up rows of several ops with peers, errors, floors and goals."""
    rows, costs = [ceiling_row(ceiling) for ceiling in CEILINGS.all], []
    for op, sizes, arms, times, floor_us in _CASES:
        case = _case(op, sizes, arms, floor_us)
        for (name, arm), us in zip(arms.items(), times, strict=True):
            rows.append(error_row(case, name, arm, 0.002))
            if arm.graph:
                rows.append(time_row(case, name, arm, [us - 1.0, us, us + 1.0], GRAPH, warm=False))
                rows.append(time_row(case, name, arm, [0.95 * us], WARM, warm=True))
            rows.append(time_row(case, name, arm, [us + 29.0, us + 30.0, us + 31.0], EAGER, warm=False))
        costs.append((case, case.cost({})))
    bounds = bound_rows(costs, rows, CEILINGS, goals=True)
    return to_frame(rows + bounds, PROVENANCE | {"device": "cuda", "gpu": "a made-up GPU"}, {})


def counted_rows() -> pd.DataFrame:
    """Return made-up counters of two attention kernels."""
    reads = {"naive": (1e10, 5e8, 7e6), "mma": (1e6, 2e8, 7e6)}
    names = ("l1_read", "l2_read", "dram_read")
    counted = {
        arm: [Counter(arm, *line) for line in zip(names, "BBB", values, strict=True)] for arm, values in reads.items()
    }
    return counter_rows("verify_attention", COUNTED_SIZES, counted)


def _case(op, sizes, arms, floor_us):
    return Case(op, sizes, lambda seed: {}, arms, lambda inputs: Cost(round(4_000_000 * floor_us)), 1000)


def made_up_rows(times, floor=100.0, parts=True):
    """Rows of one stream by row count: the round's us, two stages, 3 % more without rests, and 1 % more in the loop.

    A part of a stage takes a tenth of the round; files of before there were parts have none.
    """
    rows = []
    for count, us in times.items():
        case = {"rows": count, "streams": 1, "context": 1024, "g": 0.8, "experts": "tp", "ranks": 8, "layers": 61}
        columns = {"provenance": {}, "rows": count, "streams": 1, "context": 1024}
        rows.append(bench_row("round", "round", "us", case=case, samples=[us] * 3, **columns))
        for metric, value in (("floor", floor), ("row", 1.03 * us), ("loop", 1.01 * 1.03 * us), ("collectives", 976.0)):
            rows.append(bench_row("round", metric, "us", case=case, value=value, **columns))
        for name, share in (("experts", 0.7), ("other", 0.3)):
            staged = case | {"stage": name}
            rows.append(bench_row("round", "stage", "us", case=staged, samples=[share * us] * 3, **columns))
        staged = case | {"stage": "experts"}
        rows.append(bench_row("round", "stage floor", "us", case=staged, value=floor, **columns))
        if parts:
            cased = staged | {"part": "shared expert"}
            rows.append(bench_row("round", "part", "us", case=cased, samples=[0.1 * us] * 3, **columns))
            rows.append(bench_row("round", "part floor", "us", case=cased, value=0.05 * floor, **columns))
    return rows_frame(rows)
