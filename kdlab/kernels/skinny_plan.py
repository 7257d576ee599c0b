"""How skinny_linear's kernel cuts a product: outputs of a block, blocks of a cluster, stages, and what is compiled."""

import functools
from typing import NamedTuple

import torch

from kdlab.checks import check_int
from kdlab.errors import UnsupportedDevice
from kdlab.kernels import jit
from kdlab.kernels.constants import DTYPE_DEFINE

SAME_ROWS, MAX_ROWS = 64, 72
"""Rows up to which a row's sums do not depend on how many there are, and that the kernel takes."""
_ROOM = {"sm_90a": 115_712, "sm_100a": 115_712, "sm_120a": 101_376}
"""Architectures with clusters, and the shared memory of a block: half a multiprocessor's, so that one block can wait
while another runs, or on the last one all of it."""
_WHOLE = _ROOM | {"sm_90a": 224_256, "sm_100a": 224_256}
"""The same of a block that has a multiprocessor to itself, which leaves 8 KB for blocks of small kernels."""
THREADS = 256  # as in the .cu
SLAB = 128
ROWS = (8, 16, 24, 40, SAME_ROWS, MAX_ROWS)  # T is rounded up to one of these
_MAX_CLUSTER = 8
MIN_STAGES, _MAX_STAGES = 3, 8
LARGE = 30_000_000  # values of a matrix that takes the large tile
ALIGNMENT = 16
_THIRD, _THIRD_ROWS = 76_000, 24  # shared memory and rows of which three blocks fit a multiprocessor of _WIDE
_WIDE = ("sm_90a", "sm_100a")
_ONE_EACH, _TWO_EACH = 100, 264  # blocks, of clusters too, on an H200 at one or two a multiprocessor


class Plan(NamedTuple):
    """How a product is cut: a cluster of `split` blocks shares the inputs of `tile` outputs."""

    tile: int
    split: int
    slab: int  # inputs of a stage
    feature_warps: int  # that share the outputs of a block; the others share its inputs
    rows: int
    stages: int


def has_room(num_rows: int, features: int, inputs: int, matrices: int, arch: str) -> bool:
    """Say whether the architecture has clusters, and shared memory for the stages of this product."""
    return arch in _ROOM and make_plan(num_rows, features, inputs, matrices, arch).stages >= MIN_STAGES


@functools.lru_cache(maxsize=256)
def make_plan(num_rows: int, features: int, inputs: int, matrices: int, arch: str = "sm_90a") -> Plan:
    """Return how a product is cut; up to SAME_ROWS tile and split follow from the matrix alone, so that sums do too.

    Small tiles fill the GPU with small clusters, which fit among its multiprocessors; large ones read x less often,
    which counts once the weights take long. Measured on an H200: (32, 1) to (64, 8) at 1 to 64 rows of ten matrices.

    Raises:
        UnsupportedDevice: an architecture without clusters. ArgumentError: no rows or more than MAX_ROWS, or no values.
    """
    if arch not in _ROOM:
        raise UnsupportedDevice(f"skinny_linear: {arch} has no clusters of blocks")
    check_int("num_rows", num_rows, minimum=1, maximum=MAX_ROWS)
    for name, size in (("features", features), ("inputs", inputs), ("matrices", matrices)):
        check_int(name, size, minimum=1)
    rows = next(n for n in ROWS if n >= num_rows)
    tile, blocks = (64, 300) if features * inputs >= LARGE else (32, 200)
    most = max(1, min(_MAX_CLUSTER, inputs // SLAB, blocks // (-(-features // tile) * matrices)))
    split = 1 << most.bit_length() - 1
    if rows > SAME_ROWS and -(-features // tile) * split * matrices > _ONE_EACH:
        tile = 64
    # Where a block has one slab its time is that of the sums, which more warps along the inputs make longer.
    slabs = -(-inputs // (SLAB * split))
    plan = Plan(tile, split, SLAB, 2 if tile >= 64 or slabs == 1 else 1, rows, MIN_STAGES)
    return plan._replace(stages=_stages(plan, count_blocks(plan, features, matrices), slabs, arch))


def count_blocks(plan: Plan, features: int, matrices: int) -> int:
    """Return the blocks of a launch."""
    return -(-features // plan.tile) * plan.split * matrices


def holds_all(plan: Plan, features: int, inputs: int, matrices: int) -> bool:
    """Say whether all blocks run side by side, one a multiprocessor, each with all it reads in its stages at once."""
    return count_blocks(plan, features, matrices) <= _ONE_EACH and inputs <= _MAX_STAGES * plan.slab * plan.split


def _stages(plan: Plan, blocks: int, slabs: int, arch: str) -> int:
    """Return how many stages a block of so many slabs has; three share a multiprocessor where two would come in waves.

    The drafter's gate_up has 288 blocks, for which an H200 takes 19.9 us at two a multiprocessor and 17.5 us at three.
    """
    stage = 2 * plan.slab * (plan.tile + plan.rows)
    half, third, whole = (
        min(_MAX_STAGES, (room - 4 * plan.rows * plan.tile - ALIGNMENT) // stage)
        for room in (_ROOM[arch], _THIRD, _WHOLE[arch])
    )
    # At the end the sums of the warps along the inputs stand where the stages were.
    input_warps = THREADS // 32 // plan.feature_warps
    least = max(MIN_STAGES, -(-4 * input_warps * plan.rows * (plan.tile + 4) // stage))
    most = max(least, slabs + 1)  # one more than are read ahead
    if plan.rows > SAME_ROWS:
        half = whole
    in_waves = arch in _WIDE and blocks > _TWO_EACH and plan.rows <= _THIRD_ROWS
    found = min(most, third if in_waves and third >= MIN_STAGES else half)
    return found if found >= least else 0


def build(dtype: torch.dtype, plan: Plan) -> jit.Build:
    """Return what is compiled for a plan."""
    defines = {
        "DTYPE": DTYPE_DEFINE[dtype],
        "ROWS": plan.rows,
        "TILE": plan.tile,
        "FEATURE_WARPS": plan.feature_warps,
        "SLAB_INPUTS": plan.slab,
        "STAGES": plan.stages,
    }
    size = shared_bytes(plan)
    dynamic = (("skinny_linear", size), ("skinny_linear_columns", size))
    archs = tuple(arch for arch, room in _WHOLE.items() if size <= room)
    return jit.Build("skinny_linear.cu", tuple(defines.items()), archs, dynamic)


def shared_bytes(plan: Plan) -> int:
    """Return the dynamic shared memory of a block: the stages and `Inbox`."""
    return plan.stages * (plan.tile + plan.rows) * plan.slab * 2 + 4 * plan.rows * plan.tile + ALIGNMENT
