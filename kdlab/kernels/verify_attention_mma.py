"""Launch of the tensor-core kernel for sm_80 and up, and of the merge of what it cut along the keys."""

import math

import torch
from torch import Tensor

from kdlab.errors import NotSupported
from kdlab.kernels.jit import Build, kernel, num_sms

DTYPE_DEFINE = {torch.bfloat16: 1, torch.float16: 2}
TILE_ROWS = 64
_THREADS = 256
_PLAN_BYTES = 100_224
# How tiles are cut (verify_schedule.cuh): a key block is 32 keys, a unit the time of one.
_BLOCK_KEYS, _TILE_UNITS, _MIN_UNITS = 32, 4, 4
_FIXED_KEYS, _MAX_FIXED_PARTS = 1024, 8
_CUTS = (("CUT_TILE_UNITS", _TILE_UNITS), ("CUT_MIN_UNITS", _MIN_UNITS), ("CUT_FIXED_KEYS", _FIXED_KEYS))
_MERGE_ROWS, _MERGE_GROUPS = 4, 4  # rows a block, and groups of threads that share a row's parts


def build_mma(dtype: torch.dtype) -> Build:
    """Return the build of one dtype."""
    defines = (("DTYPE", DTYPE_DEFINE[dtype]), ("PLAN_BYTES", _PLAN_BYTES), *_CUTS)
    return Build("verify_attention_mma.cu", defines, shared_bytes=(("verify_attention_mma", _PLAN_BYTES),))


def build_merge(dtype: torch.dtype) -> Build:
    """Return the build of the merge of one dtype."""
    sizes = (("LATENT", 512), ("PART_GROUPS", _MERGE_GROUPS), ("CUT_BLOCK_KEYS", _BLOCK_KEYS))
    return Build("verify_merge.cu", (("DTYPE", DTYPE_DEFINE[dtype]), *sizes, *_CUTS))


BUILDS = tuple(build(dtype) for build in (build_mma, build_merge) for dtype in DTYPE_DEFINE)


def run_mma(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    scale: float,
    fixed_split: bool,
    o: Tensor,
    lse: Tensor,
) -> None:
    """Fill o and lse; shapes as in `verify_attention`, all tensors contiguous, C 512 and R 64.

    The grid and the workspace follow from shapes alone, so lengths may change between replays of a CUDA graph.

    Raises:
        NotSupported: another dtype than bf16 and f16.
    """
    if q.dtype not in DTYPE_DEFINE:
        raise NotSupported("q", "bfloat16 or float16 for impl='mma'", q.dtype)
    num_streams, num_rows, num_heads, _ = q.shape
    capacity = block_table.shape[1] * pages.shape[1]
    max_tiles = num_streams * -(-num_rows * num_heads // TILE_ROWS)
    fixed_parts = min(max(capacity // _FIXED_KEYS, 1), _MAX_FIXED_PARTS) if fixed_split else 0
    most_parts = max_tiles * (fixed_parts or -(-capacity // (_MIN_UNITS * _BLOCK_KEYS)))
    grid = min(num_sms(q.device), most_parts)
    slots = max_tiles * fixed_parts if fixed_split else 2 * grid
    o_partial = torch.empty(slots, TILE_ROWS, o.shape[-1], dtype=torch.float32, device=q.device)
    lse_partial = torch.empty(slots, TILE_ROWS, dtype=torch.float32, device=q.device)

    attend = kernel(build_mma(q.dtype), "verify_attention_mma", q.device)
    inputs = (q, pages, block_table, prefix_len, ancestors, num_nodes)
    sizes = (ancestors.shape[-1], block_table.shape[1], pages.shape[0], fixed_parts, scale * math.log2(math.e))
    outputs = (o, lse, o_partial, lse_partial)
    attend.launch(grid, _THREADS, *inputs, *outputs, *q.shape[:3], *sizes, shared_bytes=_PLAN_BYTES)

    merge = kernel(build_merge(q.dtype), "verify_merge", q.device)
    merge_grid = (max_tiles if fixed_split else grid, TILE_ROWS // _MERGE_ROWS)
    threads = _MERGE_ROWS * o.shape[-1] // 8 * _MERGE_GROUPS
    lengths = (prefix_len, num_nodes, o, lse, *q.shape[:3], capacity, grid, fixed_parts)
    merge.launch(merge_grid, threads, o_partial, lse_partial, *lengths, overlap=True)
