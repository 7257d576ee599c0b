"""Launch of the Hopper kernel: warpgroup products fed by TMA, the work shared out equally on the device."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdlab.errors import NotSupported
from kdlab.kernels.constants import DTYPE_DEFINE, MMA_DTYPES
from kdlab.kernels.counters import zero_counters
from kdlab.kernels.jit import HOPPER, Build, kernel, num_sms

_THREADS, _TILE, _LATENT_DIM = 256, 64, 512
_SHARED_BYTES = {32: 157_696, 64: 231_424}
"""By the keys of a block of keys."""
_SM_BYTES, _RESERVED_BYTES = 228 * 1024, 1024
"""Shared memory of a multiprocessor; what Hopper keeps of a block's for itself, ahead of static and dynamic memory."""
_PARTIALS = 2
"""Tiles that a block of the persistent grid may share with others: the one it begins with and the one it ends with."""
_MAX_MAPS = 4096
_MAX_PAGES = 2**16
"""Pages of a stream: a list of tiles is cut in 32-bit arithmetic."""
_MAX_SHARES, _FEW_SHARES, _PARTS_OF_FEW, _PARTS_OF_SHARE = 16, 4, 4, 8
"""Of `verify_parts`: ways to which a tile's parts go; up to so many ways parts of one, and beyond."""
_WARPS, _PIECES, _LARGE = 8, 16, 2
"""Of `verify_parts`: warps of a block; pieces of 8 (row, head) pairs, and how many one is where parts go one way."""
_SHARE_BYTES, _SLOT_BYTES, _LARGE_SLOT_BYTES = 4 * 32 * (10 + 4), 512 + 32, 2 * 512 + 32
"""Of `verify_parts`: shared memory of a share, and of a part under way, of a piece and of a large one."""
_MAX_SLOTS = 10
"""Parts that a share has under way at once."""
_MAX_GRID = 65_535

_FEW_PAIRS, _SHORT_PAGES = 16, 32
"""Where blocks of 32 keys are quicker: with so many (row, head) pairs and pages at most."""
FIXED_PARTS = 8
"""Of `fixed_split`: how a tile's keys are split must not depend on how many tiles there are."""


def spread_bytes(blocks: int) -> int:
    """Return the least shared memory of a block of which no more than so many fit a multiprocessor."""
    return (_SM_BYTES // (blocks + 1) - _RESERVED_BYTES) // 16 * 16 + 16


@functools.cache
def build_wgmma(dtype: torch.dtype, *, parts: bool, keys: int = 64) -> Build:
    """Return the build of one dtype, for parts of tiles (few tiles) or for a persistent grid (many).

    Args:
        dtype: of queries and keys.
        parts: a tile's keys go to several blocks.
        keys: of a block of keys, 32 or 64.
    """
    return Build(
        "verify_attention_wgmma.cu",
        (*_defines(dtype, keys), ("PARTS", int(parts))),
        HOPPER,
        (("verify_attention_wgmma", _SHARED_BYTES[keys]),),
    )


@functools.cache
def build_parts(dtype: torch.dtype, keys: int) -> Build:
    """Return the build of the kernel that adds parts up, for one dtype and one size of blocks of keys."""
    defines = (*_defines(dtype, keys), ("MAX_SHARES", _MAX_SHARES))
    shared_bytes = _MAX_SHARES * (_SHARE_BYTES + _MAX_SLOTS * _SLOT_BYTES)
    return Build("verify_parts.cu", defines, HOPPER, (("verify_parts", shared_bytes),))


def _defines(dtype: torch.dtype, keys: int) -> tuple[tuple[str, int], ...]:
    return ("DTYPE", DTYPE_DEFINE[dtype]), ("KEYS", keys), ("SHARED_BYTES", _SHARED_BYTES[keys])


BUILDS = tuple(
    build
    for dtype in MMA_DTYPES
    for build in (
        build_wgmma(dtype, parts=False),
        *(build_wgmma(dtype, parts=True, keys=keys) for keys in _SHARED_BYTES),
        *(build_parts(dtype, keys) for keys in _SHARED_BYTES),
    )
)


def most_parts(num_tiles: int, num_pages: int, num_blocks: int) -> int:
    """Return into how many parts a tile may be cut; 1 for the persistent grid, which shares tiles out as a list.

    Args:
        num_tiles: of 64 (row, head) pairs, those of unused rows too.
        num_pages: of a stream, at most.
        num_blocks: that run at once.
    """
    return max(1, min(num_blocks // num_tiles, num_pages))


def block_keys(num_pairs: int, num_pages: int) -> int:
    """Return the keys of a block of keys in parts: 32, half a page, where few rows meet few keys.

    There copies, scores and values of a block come one after the other, in half the time with half the keys.

    Args:
        num_pairs: (row, head) pairs of all streams.
        num_pages: of a stream, at most.
    """
    return 32 if num_pairs <= _FEW_PAIRS and num_pages <= _SHORT_PAGES else 64


def parts_shares(most: int) -> int:
    """Return to how many warps the parts of a tile go that are added up.

    A warp more is one more to start behind the last part's block: with 11 of them 17 rows took 1.5 us more than with 6.

    Args:
        most: parts of a tile, at most.
    """
    return min(_MAX_SHARES, max(min(_FEW_SHARES, -(-most // _PARTS_OF_FEW)), -(-most // _PARTS_OF_SHARE)))


def run_wgmma(
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
    """Fill o and lse; shapes as in `verify_attention`, all tensors contiguous.

    A part of a tile takes 66 KB of a workspace: at most 2 parts a multiprocessor, 17 MB on 132; with fixed_split 8
    parts a tile, S N H / 64 tiles.

    Raises:
        NotSupported: another dtype than bfloat16 or float16, widths other than 512 + 64, or too many pages a stream.
    """
    num_streams, num_rows, num_heads, width = q.shape
    if q.dtype not in MMA_DTYPES:
        raise NotSupported("q", "bfloat16 or float16 for impl='wgmma'", q.dtype)
    if (width, o.shape[-1]) != (_LATENT_DIM + _TILE, _LATENT_DIM):
        raise NotSupported("q", "rows of 512 + 64 values for impl='wgmma'", (o.shape[-1], width - o.shape[-1]))
    if block_table.shape[1] > _MAX_PAGES:
        raise NotSupported("block_table", f"at most {_MAX_PAGES} pages a stream", block_table.shape[1])
    pairs, sms = num_rows * num_heads, num_sms(q.device)
    tiles = -(-pairs // _TILE)
    most = FIXED_PARTS if fixed_split else most_parts(num_streams * tiles, block_table.shape[1], sms)
    keys = _TILE if fixed_split or most == 1 else block_keys(num_streams * pairs, block_table.shape[1])
    most *= _TILE // keys
    in_parts = fixed_split or most > 1
    if in_parts and max(num_streams, tiles) > _MAX_GRID:
        raise NotSupported("q", f"at most {_MAX_GRID} streams and tiles of a stream in parts", list(q.shape))
    partial, partial_lse = _workspace(q, num_streams * tiles * most if in_parts else _PARTIALS * sms)
    inputs = (
        tensor_map(q.data_ptr(), (num_streams, pairs, width), (1, min(-(-pairs // 8) * 8, _TILE), 64)),
        tensor_map(pages.data_ptr(), (pages.shape[0] * pages.shape[1], width), (keys, 64)),
        *(block_table, prefix_len, ancestors, num_nodes),
    )
    outputs = (o, lse, partial, partial_lse, None if in_parts else zero_counters(q.device, num_sms(q.device)))
    lengths = (num_streams, num_rows, num_heads, ancestors.shape[-1], block_table.shape[1], pages.shape[0])
    program = kernel(build_wgmma(q.dtype, parts=in_parts, keys=keys), "verify_attention_wgmma", q.device)
    place = (_RESERVED_BYTES + program.resources.shared_bytes) // 16
    args = (*inputs, *outputs, *lengths, int(fixed_split), place, scale * math.log2(math.e))
    grid = (most, tiles, num_streams) if in_parts else sms
    program.launch(grid, _THREADS, *args, shared_bytes=_SHARED_BYTES[keys], overlap=True)
    if in_parts:
        _add_parts(
            q, (prefix_len, num_nodes, partial, partial_lse, o, lse), (block_table.shape[1], most, fixed_split), keys
        )


def _add_parts(q: Tensor, tensors: tuple[Tensor, ...], division: tuple[int, int, bool], keys: int) -> None:
    """Fill the rows of o and lse whose tiles have several parts; `division`: table width, most parts, fixed split."""
    num_streams, num_rows, num_heads, _ = q.shape
    width, most, fixed_split = division
    program = kernel(build_parts(q.dtype, keys), "verify_parts", q.device)
    shares = parts_shares(most)
    slots = min(_MAX_SLOTS, -(-most // (2 * shares)) * 2)
    if shares == 1:
        pieces, size, shared_bytes = _WARPS, _LARGE, _WARPS * slots * _LARGE_SLOT_BYTES
    else:
        pieces, size = 1 << max(_WARPS // shares, 1).bit_length() - 1, 1
        shared_bytes = pieces * shares * (_SHARE_BYTES + slots * _SLOT_BYTES)
    grid = (-(-num_rows * num_heads // 8) * _PIECES // (pieces * size), 1, num_streams)
    # Blocks that start early pile up on multiprocessors without a part, unless only an equal share has room there. With
    # about one block a multiprocessor, where there is little to share, that cost 0.6 us (9 rows, H200).
    blocks, sms = grid[0] * num_streams, num_sms(q.device)
    if 2 * blocks > 3 * sms:
        shared_bytes = max(shared_bytes, spread_bytes(-(-blocks // sms)))
    sizes = (num_streams, num_rows, num_heads, width, most, int(fixed_split), slots)
    program.launch(grid, (32, pieces, shares), *tensors, *sizes, shared_bytes=shared_bytes, overlap=True)


def _workspace(q: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Return room for so many parts of tiles, rounded to q's dtype, and for their log-sum-exp."""
    o = torch.empty(slots, _TILE, _LATENT_DIM, dtype=q.dtype, device=q.device)
    return o, torch.empty(slots, _TILE, dtype=torch.float32, device=q.device)


@dataclass(frozen=True, slots=True)
class _Memory:
    """An address and a shape for cuda.core; unlike a tensor it keeps nothing alive."""

    pointer: int
    shape: tuple[int, ...]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "data": (self.pointer, False), "shape": self.shape, "typestr": "<u2", "strides": None}


@functools.lru_cache(maxsize=_MAX_MAPS)
def tensor_map(pointer: int, shape: tuple[int, ...], box: tuple[int, ...]) -> Any:
    """Describe contiguous 16-bit values to TMA, with 128-byte swizzle; a box outside `shape` reads zeros there."""
    from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_cuda_array_interface(_Memory(pointer, shape), stream_ptr=-1)
    options = {"swizzle": TensorMapSwizzle.SWIZZLE_128B, "l2_promotion": TensorMapL2Promotion.L2_256B}
    return view.as_tensor_map(box_dim=box, **options)
