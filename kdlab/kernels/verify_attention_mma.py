"""Launch of the tensor-core kernel for sm_80 and up, and of the merge of what it cut along the keys."""

import math

import torch
from torch import Tensor

from kdlab.errors import NotSupported
from kdlab.kernels.constants import DTYPE_DEFINE, MMA_DTYPES
from kdlab.kernels.jit import Build, kernel, num_sms

TILE_ROWS = 64
_THREADS = 256
_PLAN_BYTES = 99_968
# How tiles are cut (verify_schedule.cuh): a unit is the time of a key block of 32 keys.
_BLOCK_KEYS, _TILE_UNITS, _MIN_UNITS = 32, 4, 2
_FIXED_KEYS, _MAX_FIXED_PARTS = 1024, 8
_CUTS = (("CUT_TILE_UNITS", _TILE_UNITS), ("CUT_MIN_UNITS", _MIN_UNITS), ("CUT_FIXED_KEYS", _FIXED_KEYS))
_MAX_UNITS = 2**30
_CUT_WORDS = 8  # a row of the table of cut tiles
_LATENT = 512
MERGE_THREADS = 256


def build_mma(dtype: torch.dtype) -> Build:
    """Return the build of one dtype."""
    defines = (("DTYPE", DTYPE_DEFINE[dtype]), ("PLAN_BYTES", _PLAN_BYTES), *_CUTS)
    return Build("verify_attention_mma.cu", defines, shared_bytes=(("verify_attention_mma", _PLAN_BYTES),))


def build_merge(dtype: torch.dtype) -> Build:
    """Return the build of the merge of one dtype."""
    sizes = (("LATENT", _LATENT), ("CUT_BLOCK_KEYS", _BLOCK_KEYS))
    return Build("verify_merge.cu", (("DTYPE", DTYPE_DEFINE[dtype]), *sizes, *_CUTS))


BUILDS = tuple(build(dtype) for build in (build_mma, build_merge) for dtype in MMA_DTYPES)


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

    The grid and the workspace follow from shapes alone, so lengths may change between replays of a CUDA graph. The
    workspace is 35 MB on 132 multiprocessors; with fixed_split it is 131 KB a tile and part, up to 8 parts: 1.1 MB a
    tile, S N H / 64 tiles, where the block table holds 8,192 keys or more.

    Raises:
        NotSupported: another dtype than bf16 and f16, or more work than 31 bits count.
    """
    if q.dtype not in MMA_DTYPES:
        raise NotSupported("q", "bfloat16 or float16 for impl='mma'", q.dtype)
    capacity, max_tiles = block_table.shape[1] * pages.shape[1], num_tiles(q)
    if max_tiles * (capacity // _BLOCK_KEYS + 1 + _TILE_UNITS) > _MAX_UNITS:
        raise NotSupported("q", f"at most {_MAX_UNITS} key blocks of all tiles for impl='mma'", list(q.shape))
    fixed_parts = min(max(capacity // _FIXED_KEYS, 1), _MAX_FIXED_PARTS) if fixed_split else 0
    grid = min(num_sms(q.device), max_tiles * (fixed_parts or -(-capacity // (_MIN_UNITS * _BLOCK_KEYS))))
    parts = _workspace(q, max_tiles * fixed_parts if fixed_split else 2 * grid, grid)
    inputs = (q, pages, block_table, prefix_len, ancestors, num_nodes)
    _launch(inputs, scale, (o, lse, *parts), grid, fixed_parts, tail_only=False)

    # Few tiles have many parts each, so that their rows had better go to many blocks.
    merge_grid = (max_tiles if fixed_split else grid, 16 if max_tiles * 4 > grid else TILE_ROWS)
    merge = kernel(build_merge(q.dtype), "verify_merge", q.device)
    lengths = (prefix_len, num_nodes, o, lse, *q.shape[:3], capacity, fixed_parts)
    merge.launch(merge_grid, MERGE_THREADS, *parts, *lengths, overlap=True)


def run_mma_tail(inputs: tuple[Tensor, ...], scale: float, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to the tree's own rows only.

    Args:
        inputs: q, pages, block_table, prefix_len, ancestors, num_nodes as in `run_mma`.
        scale: factor of the scores.
        o, lse: outputs of the whole op, not written.

    Returns:
        One part a tile: o_partial [tiles, 64, C] f32, normalised, and lse_partial [tiles, 64] f32, log2.
    """
    q = inputs[0]
    grid = min(num_sms(q.device), num_tiles(q))
    parts = _workspace(q, num_tiles(q), grid)
    _launch(inputs, scale, (o, lse, *parts), grid, 1, tail_only=True)
    return parts[:2]


def num_tiles(q: Tensor) -> int:
    """Return how many tiles of 64 (row, head) pairs the streams of q [S, N, H, C + R] have, unused rows included."""
    num_streams, num_rows, num_heads, _ = q.shape
    return num_streams * -(-num_rows * num_heads // TILE_ROWS)


def _workspace(q: Tensor, slots: int, grid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for so many parts of tiles, their log-sum-exp, and the table of the tiles that were cut."""
    o_partial = torch.empty(slots, TILE_ROWS, _LATENT, dtype=torch.float32, device=q.device)
    lse_partial = torch.empty(slots, TILE_ROWS, dtype=torch.float32, device=q.device)
    return o_partial, lse_partial, torch.empty(grid, _CUT_WORDS, dtype=torch.int32, device=q.device)


def _launch(
    inputs: tuple[Tensor, ...],
    scale: float,
    outputs: tuple[Tensor, ...],
    grid: int,
    fixed_parts: int,
    *,
    tail_only: bool,
) -> None:
    q, pages, block_table, _, ancestors, _ = inputs
    program = kernel(build_mma(q.dtype), "verify_attention_mma", q.device)
    sizes = (*q.shape[:3], ancestors.shape[-1], block_table.shape[1], pages.shape[0], fixed_parts, int(tail_only))
    scale_log2 = scale * math.log2(math.e)
    program.launch(grid, _THREADS, *inputs, *outputs, *sizes, scale_log2, shared_bytes=_PLAN_BYTES)
