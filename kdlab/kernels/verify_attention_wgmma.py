"""Launch of the Hopper kernel: warpgroup products fed by TMA, the work shared out equally on the device."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdlab.errors import NotSupported
from kdlab.kernels.constants import DTYPE_DEFINE, MMA_DTYPES
from kdlab.kernels.jit import HOPPER, Build, kernel, num_sms

_THREADS, _SHARED_BYTES = 256, 231_424
_TILE, _LATENT_DIM = 64, 512
_RESERVED_BYTES = 1024
"""Shared memory of a block that Hopper keeps for itself; static memory comes next, then dynamic."""
_PARTIALS = 2
"""Tiles that a cluster may share with others: the one that it begins with and the one that it ends with."""
_MIN_SHARE = 2
"""Key blocks a block of the grid, at least, before a tile gets another part."""
_MAX_MAPS = 4096
_MAX_PAGES = 2**16
"""Pages of a stream: a list of tiles is cut in 32-bit arithmetic."""
_COUNTER_SETS = 4096
"""Calls that may be under way at once, those of captured graphs included, before two share counters."""


CLUSTERS = (1, 2, 4, 8)
"""Blocks that share the keys of one tile and merge their sums without global memory."""
FIXED = 8
"""Of `fixed_split`: how a tile's keys are split must not depend on how many tiles there are."""


def build_wgmma(dtype: torch.dtype, cluster: int) -> Build:
    """Return the build of one dtype and one size of clusters."""
    defines = (("DTYPE", DTYPE_DEFINE[dtype]), ("CLUSTER", cluster), ("SHARED_BYTES", _SHARED_BYTES))
    return Build("verify_attention_wgmma.cu", defines, HOPPER, (("verify_attention_wgmma", _SHARED_BYTES),))


BUILDS = tuple(build_wgmma(dtype, cluster) for dtype in MMA_DTYPES for cluster in CLUSTERS)


def choose_cluster(num_tiles: int, num_pages: int, units: Mapping[int, int]) -> int:
    """Return the size of clusters for a batch. Its lengths stand on the device; the block table bounds them.

    The size that is likely to end first, in the time of a block of keys, by what an H200 needed: a block's share of a
    tile, the merge within a cluster, and that of a tile's parts in global memory, where one cluster reads all of them.

    Args:
        num_tiles: of 64 (row, head) pairs, those of unused rows too.
        num_pages: of a stream, at most.
        units: clusters that run at once, by their size.
    """

    def cost(size: int) -> float:
        parts = max(1, min(units[size] // num_tiles, num_pages // (_MIN_SHARE * size)))
        merges = (2 if size > 1 else 0) + (1 + 2 * parts / size if parts > 1 else 0)
        return max(num_pages / (size * parts), 1) + merges

    return min((size for size in reversed(CLUSTERS) if num_tiles <= units[size]), key=cost, default=1)


@functools.cache
def _units(device: torch.device, dtype: torch.dtype) -> Mapping[int, int]:
    # Every build gives the same numbers; a few rows, the common case, need this one anyway.
    program = kernel(build_wgmma(dtype, FIXED), "verify_attention_wgmma", device)
    return {1: num_sms(device)} | {n: program.max_clusters(_THREADS, _SHARED_BYTES, n) for n in (2, 4, 8)}


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
    num_tiles = num_streams * -(-num_rows * num_heads // _TILE)
    units = _units(q.device, q.dtype)
    cluster = FIXED if fixed_split else choose_cluster(num_tiles, block_table.shape[1], units)
    grid = units[cluster] * cluster
    sums = _PARTIALS * units[cluster] * _TILE * _LATENT_DIM // 2  # two in four bytes
    parts = torch.empty(sums + _PARTIALS * grid * _TILE, dtype=torch.float32, device=q.device)
    outputs = (o, lse, parts, parts[sums:], _counters(q.device))
    inputs = (
        tensor_map(q.data_ptr(), (num_streams, num_rows * num_heads, width), (1, _TILE, 64)),
        tensor_map(pages.data_ptr(), (pages.shape[0] * pages.shape[1], width), (_TILE, 64)),
        *(block_table, prefix_len, ancestors, num_nodes),
    )
    lengths = (num_streams, num_rows, num_heads, ancestors.shape[-1], block_table.shape[1], pages.shape[0])
    program = kernel(build_wgmma(q.dtype, cluster), "verify_attention_wgmma", q.device)
    place = (_RESERVED_BYTES + program.resources.shared_bytes) // 16
    args = (*inputs, *outputs, *lengths, int(fixed_split), place, scale * math.log2(math.e))
    shape = None if cluster == 1 else cluster
    program.launch(grid, _THREADS, *args, shared_bytes=_SHARED_BYTES, cluster=shape, overlap=True)


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


_rings: dict[torch.device, tuple[Tensor, Iterator[int]]] = {}


def _counters(device: torch.device) -> Tensor:
    """Return counters that are zero: the kernel leaves them so, and calls take turns with the sets of a ring."""
    count = num_sms(device)
    if device not in _rings:
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=device)
        # Filled on a stream of its own: nothing that is under way need end first, and every stream may use it then.
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            ring = torch.zeros(_COUNTER_SETS, count, dtype=torch.int32, device=device)
        side.synchronize()
        _rings.setdefault(device, (ring, itertools.count()))  # another thread may have been quicker
    ring, turns = _rings[device]
    return ring[next(turns) % _COUNTER_SETS]
