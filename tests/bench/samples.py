"""Result rows of a kernel benchmark that never ran, for what reads and draws them."""

import pandas as pd

from kdlab.bench.kernels.case import Arm, Case
from kdlab.bench.kernels.ceilings import Ceiling, Ceilings
from kdlab.bench.kernels.measured import ceiling_row, error_row, goal_rows, time_row, to_frame
from kdlab.kernels.cost import Cost
from tests.golden.make_parquet_v1 import PROVENANCE

CEILINGS = Ceilings((
    Ceiling("copy", "TB/s", [4.2, 4.25], "a copy"),
    Ceiling("read", "TB/s", [4.0, 4.0], "a read"),
    Ceiling("matrix", "TFLOP/s", [800.0, 800.0], "a product"),
    Ceiling("launch", "us", [1.0, 1.1], "a kernel"),
))  # fmt: skip
"""Of a made-up card of 4 TB/s and 800 TFLOP/s."""


def kernel_rows() -> pd.DataFrame:
    """Return made-up rows of several ops with peers, errors, floors and goals; one goal of five is missed."""
    rows, floors = [ceiling_row(ceiling) for ceiling in CEILINGS.all], []
    for case, times in _cases():
        for name, us in times.items():
            arm = case.arms[name]
            rows.append(error_row(case, name, arm, 0.002))
            if arm.graph:
                rows.append(time_row(case, name, arm, [us - 1.0, us, us + 1.0], graph=True))
            rows.append(time_row(case, name, arm, [us + 29.0, us + 30.0, us + 31.0], graph=False))
        floors.append((case, CEILINGS.floor_us(case.cost({}))))
    return to_frame(rows + goal_rows(floors, rows), PROVENANCE | {"device": "cuda", "gpu": "a made-up GPU"}, {})


def _cases():
    own, peer = Arm(print, print, goal=True), Arm(print, print, own=False)
    attention = {"wgmma": own, "mma": Arm(print, print), "naive": Arm(print, print), "flashmla prefix": peer}
    times = {256: (12.0, 15.0, 200.0, 18.0), 1024: (18.0, 24.0, 900.0, 24.0), 4096: (40.0, 60.0, 8600.0, 50.0)}
    for prefix, us in times.items():
        sizes = {"streams": 1, "rows": 33, "prefix": prefix, "heads": 64}
        yield (
            _case("verify_attention", sizes, attention, flops=prefix * 4_687_500),
            dict(zip(attention, us, strict=True)),
        )
    arms = {"cuda": own, "host heap": Arm(print, print, graph=False, own=False)}
    sizes = {"streams": 1, "budget": 64, "draft": "peaked", "depth": 15, "k": 64}
    yield _case("tree_build", sizes, arms, num_bytes=400), {"cuda": 7.0, "host heap": 700.0}
    sizes = {"streams": 1, "rows": 33, "width": 2048, "shared": False, "routing": "uniform"}
    yield _case("moe_int4", sizes, {"cuda": own}, num_bytes=4_000_000_000), {"cuda": 1200.0}


def _case(op, sizes, arms, num_bytes=0, flops=0):
    return Case(op, sizes, lambda seed: {}, arms, lambda inputs: Cost(num_bytes, flops), 1000)
