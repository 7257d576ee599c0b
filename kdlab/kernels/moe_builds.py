"""What is compiled for moe_int4: shapes and dtypes to constants of the sources, and the shared memory they need."""

import functools
import math
from typing import Literal

import torch

from kdlab.config import INT4_GROUP
from kdlab.kernels import jit
from kdlab.kernels.constants import MMA_DTYPES, expert_constants
from kdlab.kernels.moe_slices import slices_build

THREADS = 256
_WARPS, TILE_PICKS = THREADS // 32, 8
_MAX_STAGES = 4
_RING_BYTES = {False: 88_000, True: 104_000}
"""With the static part, what a block of the smallest GPU has, and one of two on a multiprocessor of the `_LARGE`."""
_BLOCKS_PER_SM = 2
FEW_ROWS, _FEW_PICKS, _FEW_SHARES = 4, 8, 8  # most rows and k of moe_few_rows.cu; warps that share its `down`'s experts
_FEW_SLOTS = {"UP": 2, "DOWN": 2}  # units of work whose weights a warp holds
_FEW_FEATURES = 56  # of a block of `down`: 128 blocks at D = 7168, nearly all multiprocessors
_LARGE_BYTES, _LARGE = 232_448, ("sm_90a", "sm_100a")  # shared memory of a block at most, and who has so much
_MANY_PANEL_ROWS, _MANY_SLAB, _MANY_TICKETS = 256, 256, 16  # of moe_many_rows.cu
MANY_THREADS = 640
MANY_ROWS, MANY_ROWS_WHOLE, WIDE_ROWS = 68, 80, 1153
"""From so many rows on experts that have a `many_build` run by moe_many_rows.cu (Hopper): narrow ones, of which
moe_slices takes up to 67 rows, and wider ones; and by its wide tiles. On an H200, with k = 8 of 384 experts (a slice of
8, and the shared one), `slices` takes 163 us at 67 rows and `many` 173, `rows` 194 at 72 and `many` 176; of 48 whole
experts `rows` and `many` take 192 and 199 us at 73, 202 both at 80, 218 and 208 at 88. From 1,153 rows on an expert's
picks fill more than a narrow tile on average."""
_NARROW = 256
Path = Literal["few", "slices", "rows", "many"]
"""What runs, and the shared expert with it. few: both kernels of moe_few_rows.cu, with the shared expert inside. rows:
the three of moe_int4.cu, with its products as units of work beside the routed ones. slices: the first of these, with
the same units, and moe_slices.cu, a warp of which has it. many: moe_many_rows.cu, beside whose
kernels torch multiplies for it, on a second stream, and which activates and adds the results."""


def moe_path(
    num_rows: int,
    top_k: int,
    dtype: torch.dtype,
    scale: torch.dtype | None,
    width: int,
    inner: int,
    num_experts: int,
    shared: int = 0,
    *,
    arch: str = "sm_90a",
) -> tuple[Path, tuple[jit.Build, ...]]:
    """Return which kernels run, and their builds: the host knows shapes and the number of rows, never who picks whom.

    Args:
        num_rows: T, at least 1.
        top_k: k.
        dtype: of the rows.
        scale: dtype of INT4 weights' scales, None for dense weights.
        width: D.
        inner: I.
        num_experts: E.
        shared: inner width of the shared expert, 0 without one.
        arch: what is compiled for.
    """
    shape = (width, inner, num_experts)
    if num_rows <= FEW_ROWS and top_k <= _FEW_PICKS and scale is not None:
        few = few_build(dtype, scale, *shape, shared)
        if few is not None and arch in few.archs:
            return "few", (few,)
    if num_rows >= many_rows(inner) and scale is not None and arch in jit.HOPPER:
        many = many_build(dtype, scale, *shape, wide=num_rows >= WIDE_ROWS)
        if many is not None:
            return "many", (many,)
    build = rows_build(dtype, scale, *shape, shared, large=arch in _LARGE)
    if scale is not None and arch in jit.HOPPER:
        slices = slices_build(num_rows, top_k, dtype, scale, *shape, shared)
        if slices is not None:
            return "slices", (build, slices)
    return "rows", (build,)


def many_rows(inner: int) -> int:
    """Return from how many rows on moe_many_rows.cu runs experts of inner width I, where it is built for them."""
    return MANY_ROWS if inner <= _NARROW else MANY_ROWS_WHOLE


@functools.lru_cache(maxsize=64)
def rows_build(
    dtype: torch.dtype,
    scale: torch.dtype | None,
    width: int,
    inner: int,
    num_experts: int,
    shared: int = 0,
    *,
    large: bool = True,
) -> jit.Build:
    """Return the build for rows of `dtype` and INT4 weights with scales of a dtype, or dense ones (None).

    Args:
        dtype: of the rows, and of dense weights.
        scale: of the scales.
        width: D.
        inner: I.
        num_experts: E.
        shared: inner width of the shared expert, 0 without one.
        large: for GPUs with as much shared memory as Hopper, or for the others.
    """
    narrow, most = dtype != torch.float32, _RING_BYTES[large]
    # A warp of `down` that has all inputs of its rows needs no sums of other warps, where these inputs are few.
    whole = scale is not None and narrow and inner in (128, 256)
    whole = whole and 2 * _stage_bytes(dtype, scale, inner, 32, whole=True) <= most
    rows = 64 if scale is not None and narrow else 32  # wide weights would make a stage too large
    down_rows = 32 if whole else rows
    shared_rows, picks = (16, 2 * TILE_PICKS) if narrow else (32, TILE_PICKS)
    slabs = {  # bytes of a slab, and of the warps' sums, which stand behind all slabs
        "UP": (_stage_bytes(dtype, scale, width, rows), _sum_bytes(rows)),
        "DOWN": (_stage_bytes(dtype, scale, inner, down_rows, whole=whole), 0 if whole else _sum_bytes(rows)),
        "SHARED_UP": (_stage_bytes(dtype, None, width, shared_rows, picks), _sum_bytes(shared_rows, picks)),
        "SHARED_DOWN": (_stage_bytes(dtype, None, shared or INT4_GROUP, 32, picks), _sum_bytes(32, picks)),
    }
    stages = {name: min(_MAX_STAGES, (most - sums) // size) for name, (size, sums) in slabs.items()}
    ring = max(stages[name] * size + sums for name, (size, sums) in slabs.items())
    defines = expert_constants(dtype, scale, width, inner, num_experts) | {
        "PACKED": int(scale is not None),
        "UP_ROWS": rows,
        "DOWN_ROWS": down_rows,
        "WHOLE_DOWN": int(whole),
        "SHARED_WIDTH": shared,
        "SHARED_UP_ROWS": shared_rows,
        "SHARED_DOWN_ROWS": 32,
        "SHARED_PICKS": picks,
        **{f"{name}_STAGES": count for name, count in stages.items()},
        "RING_BYTES": ring,
        "BLOCKS_PER_SM": _BLOCKS_PER_SM if narrow and large else 1,
    }
    dynamic = (("moe_gate_up", ring), ("moe_down", ring), ("moe_sum", 0))
    archs = tuple(arch for arch in jit.PORTABLE if (arch in _LARGE) == large)
    return jit.Build("moe_int4.cu", tuple(defines.items()), archs, dynamic)


def _stage_bytes(
    dtype: torch.dtype,
    scale: torch.dtype | None,
    inputs: int,
    warp_rows: int,
    x_rows: int = TILE_PICKS,
    *,
    whole: bool = False,
) -> int:
    """Return the bytes of `Stage` in moe_weights.cuh, which asserts that they are enough."""
    packed, narrow = scale is not None, dtype != torch.float32
    warp_inputs = inputs if whole else math.gcd(inputs, 64 if packed else 32)
    k_warps = math.gcd(inputs // warp_inputs, _WARPS)
    rows, slab = warp_rows * _WARPS // k_warps, warp_inputs * k_warps
    size = rows * slab // 2 if packed else rows * slab * dtype.itemsize
    if scale is not None:
        scale_bytes = slab // INT4_GROUP * scale.itemsize
        size += -(-rows * (scale_bytes + (16 if scale_bytes >= 32 else 0)) // 128) * 128
    if narrow:
        size += x_rows * slab * dtype.itemsize
    return -(-size // 128) * 128


def _sum_bytes(warp_rows: int, picks: int = TILE_PICKS) -> int:
    """Return the bytes of all warps' partial sums, SUM_BYTES in the source."""
    return _WARPS * picks * (warp_rows + 4) * 4


@functools.lru_cache(maxsize=32)
def few_build(
    dtype: torch.dtype, scale: torch.dtype, width: int, inner: int, num_experts: int, shared: int = 0
) -> jit.Build | None:
    """Return the build for a few rows, where the experts are so narrow that it is the faster one; else None.

    Args:
        dtype: of the rows.
        scale: of the scales.
        width: D.
        inner: I.
        num_experts: E.
        shared: inner width of the shared expert, 0 without one.
    """
    groups, features = math.gcd(width // INT4_GROUP, 16), min(_FEW_FEATURES, width // 16)
    up_warps, down_warps = width // INT4_GROUP // groups, _FEW_SHARES * -(-features // 32)
    if dtype not in MMA_DTYPES or width % 256 or up_warps > 16:
        return None
    if inner not in (64, 128, 256) or shared not in (0, 128, 256):
        return None
    up = up_warps * _FEW_SLOTS["UP"] * _few_slot(1, groups, scale)
    down = down_warps * (_FEW_SLOTS["DOWN"] * _few_slot(2, inner // INT4_GROUP, scale) + (2048 if shared else 0))
    up_sums, down_sums = 2 * 4 * 24 * 4, (32 + 4 * shared // INT4_GROUP) * down_warps // _FEW_SHARES * 128
    fixed = (up_warps * (up_sums + groups * 16), down_sums + 33 * inner * 2 + 4 * shared * 2 + 128)
    if max(up + fixed[0], down + fixed[1]) > _LARGE_BYTES:
        return None
    defines = expert_constants(dtype, scale, width, inner, num_experts) | {
        "PACKED": 1,
        "SHARED_WIDTH": shared,
        "DOWN_FEATURES": features,
        **{f"{name}_SLOTS": slots for name, slots in _FEW_SLOTS.items()},
        "UP_BYTES": up,
        "DOWN_BYTES": down,
    }
    dynamic = (("moe_few_gate_up", up), ("moe_few_down", down))
    return jit.Build("moe_few_rows.cu", tuple(defines.items()), _LARGE, dynamic)


@functools.lru_cache(maxsize=32)
def many_build(
    dtype: torch.dtype, scale: torch.dtype, width: int, inner: int, num_experts: int, *, wide: bool
) -> jit.Build | None:
    """Return the build for many rows of 16-bit `dtype` and INT4 weights with scales of the same; None for others.

    Wide tiles are for many picks an expert; their products run by other instructions, so that bits differ.

    Args:
        dtype: of the rows.
        scale: of the scales.
        width: D.
        inner: I.
        num_experts: E.
        wide: for WIDE_ROWS rows and more.
    """
    eights, places = (6, 4) if wide else (3, 5)
    if dtype not in MMA_DTYPES or scale != dtype or width % _MANY_PANEL_ROWS or inner % (_MANY_PANEL_ROWS // 2):
        return None
    slab = max(math.gcd(inputs, _MANY_SLAB) for inputs in (width, inner))
    step = 2 * _MANY_PANEL_ROWS * 32 + 8 * eights * slab * 2  # at most: scales, rows of x
    ring = places * _MANY_PANEL_ROWS * slab // 2 + 2 * step
    defines = expert_constants(dtype, scale, width, inner, num_experts) | {
        "TILE_EIGHTS": eights,
        "SLAB_INPUTS": _MANY_SLAB,
        "RING_BYTES": ring,
    }
    shared = ring + _MANY_TICKETS * (32 + 64 * eights)  # and barriers, and items taken
    sizes = {"plan": 0, "experts": shared, "activate": 0, "sum": 0}
    dynamic = tuple((f"moe_many_{name}", size) for name, size in sizes.items())
    return jit.Build("moe_many_rows.cu", tuple(defines.items()), jit.HOPPER, dynamic)


def most_tiles(num_picks: int, num_experts: int, tile_picks: int) -> int:
    """Return how many tiles moe_many_plan makes of so many picks at most, whoever picks whom."""
    return num_picks // tile_picks + min(num_picks, num_experts)


def _few_slot(tiles: int, groups: int, scale: torch.dtype) -> int:
    """Return the bytes of `Slot` in moe_few_rows.cu."""
    return -(-tiles * 16 * (groups * (16 + scale.itemsize) + 16) // 128) * 128


def few_threads(width: int, features: int) -> tuple[int, int]:
    """Return the threads of a block of either kernel of moe_few_rows.cu, for D and the features of `down`'s blocks."""
    groups = width // INT4_GROUP
    return groups // math.gcd(groups, 16) * 32, _FEW_SHARES * -(-features // 32) * 32


_K26 = (7168, 384)  # D and E; I is 2048, or 256 on one rank of 8
BUILDS = tuple(
    rows_build(dtype, torch.bfloat16, _K26[0], inner, _K26[1], inner, large=large)
    if packed
    else rows_build(dtype, None, _K26[0], inner, 1, large=large)
    for large in (True, False)
    for dtype, inners in ((torch.bfloat16, (2048, 256)), (torch.float16, (2048,)), (torch.float32, (2048,)))
    for inner in inners
    for packed in (True, False)
)
_FEW = few_build(torch.bfloat16, torch.bfloat16, _K26[0], 256, _K26[1], 256)
BUILDS += () if _FEW is None else (_FEW,)
# One rank of 8 with a slice of each expert, or with whole experts; and the widest stage.
_MANY = [
    many_build(torch.bfloat16, torch.bfloat16, _K26[0], *held, wide=wide)
    for held in ((256, 384), (2048, 48))
    for wide in (False, True)
]
_MANY.append(many_build(torch.float16, torch.float16, _K26[0], 2048, 384, wide=True))
BUILDS += tuple(build for build in _MANY if build is not None)
