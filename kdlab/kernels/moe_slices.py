"""What is compiled and launched for `down` of a few rows of INT4 experts: csrc/moe_slices.cu behind moe_gate_up."""

import functools

import torch

from kdlab.config import INT4_GROUP
from kdlab.kernels import jit
from kdlab.kernels.constants import DTYPE_DEFINE, MMA_DTYPES, expert_constants

_BLOCKS, _STREAMS = 132, 11  # multiprocessors of an H200; warps that stream weights, for as many as registers suffice
_SHARED_BYTES = 227 * 1024  # of a block, on Hopper
_MOST_PICKS = 2047


def slices_build(
    num_rows: int,
    top_k: int,
    dtype: torch.dtype,
    scale: torch.dtype,
    width: int,
    inner: int,
    num_experts: int,
    shared: int = 0,
) -> jit.Build | None:
    """Return the build for so many rows, or None where a block has no room for what they make, or no kernel fits.

    The arguments are those of `moe_builds.moe_path`.
    """
    build = _slices_build(dtype, scale, width, inner, num_experts, shared)
    if build is None or num_rows * top_k > _MOST_PICKS:
        return None
    return build if slices_bytes(build, num_rows, top_k) <= build.shared_bytes[0][1] else None


@functools.lru_cache(maxsize=32)
def _slices_build(
    dtype: torch.dtype,
    scale: torch.dtype,
    width: int,
    inner: int,
    num_experts: int,
    shared: int,
) -> jit.Build | None:
    # A warp has all inputs of a pick in registers.
    of_block = [n for n in range(8, 65, 8) if width % n == 0 and width // n <= _BLOCKS]
    if dtype not in MMA_DTYPES or inner not in (64, 128, 256) or not of_block or shared % INT4_GROUP:
        return None
    defines = expert_constants(dtype, scale, width, inner, num_experts) | {
        "SHARED_WIDTH": shared,
        "FEATURES": of_block[0],
        "PASSES": 1,  # two of half as many features take more rows, and are no faster there than moe_int4.cu
        "STREAMS": _STREAMS,
    }
    plan = -(-(8 * num_experts + 4 * (_STREAMS + 1)) // 128) * 128
    dynamic = (("moe_slices", _SHARED_BYTES - plan),)
    return jit.Build("moe_slices.cu", tuple(defines.items()), jit.HOPPER, dynamic)


def slices_bytes(build: jit.Build, num_rows: int, top_k: int) -> int:
    """Return the dynamic shared memory of moe_slices: a slice of an expert a warp, results, and who picks whom."""
    constants = dict(build.defines)
    features, inner, shared = (int(constants[name]) for name in ("FEATURES", "INNER_WIDTH", "SHARED_WIDTH"))
    scale = next(dtype for dtype, number in DTYPE_DEFINE.items() if number == constants["SCALE_DTYPE"])
    slot = -(-features * (inner // 2 + inner // INT4_GROUP * scale.itemsize) // 128) * 128
    results = num_rows * (top_k + (shared > 0)) * features * 4
    return int(constants["STREAMS"]) * slot + results + num_rows * top_k * 10


def slices_grid(build: jit.Build) -> tuple[int, int]:
    """Return the blocks of moe_slices and the threads of one."""
    constants = {name: int(value) for name, value in build.defines}
    blocks = constants["MODEL_WIDTH"] // constants["FEATURES"]
    return blocks, 32 * (constants["STREAMS"] + (constants["SHARED_WIDTH"] > 0))


_RANK = slices_build(33, 8, torch.bfloat16, torch.bfloat16, 7168, 256, 384, 256)  # of 8
BUILDS = () if _RANK is None else (_RANK,)
