"""Launch of the Hopper kernel: warpgroup products fed by TMA, the work shared out equally on the device."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdlab.errors import NotSupported
from kdlab.kernels.jit import HOPPER, Build, kernel, num_sms

_DTYPE_DEFINE = {torch.bfloat16: 1, torch.float16: 2}
_THREADS, _SHARED_BYTES = 256, 231_424
_TILE, _LATENT_DIM = 64, 512
_PARTIALS = 2
"""Tiles that a block of the grid may share with others: the one that it begins with and the one that it ends with."""
_MAX_MAPS = 4096
_COUNTER_SETS = 4096
"""Calls that may be under way at once, those of captured graphs included, before two share counters."""


def build_wgmma(dtype: torch.dtype, *defines: tuple[str, str | int]) -> Build:
    """Return the build of one dtype, with further constants."""
    everything = (("DTYPE", _DTYPE_DEFINE[dtype]), *defines)
    return Build("verify_attention_wgmma.cu", everything, HOPPER, (("verify_attention_wgmma", _SHARED_BYTES),))


BUILDS = tuple(build_wgmma(dtype) for dtype in _DTYPE_DEFINE)


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
        NotSupported: another dtype than bfloat16 or float16, or widths other than 512 + 64.
    """
    num_streams, num_rows, num_heads, width = q.shape
    if q.dtype not in _DTYPE_DEFINE:
        raise NotSupported("q", "bfloat16 or float16 for impl='wgmma'", q.dtype)
    if (width, o.shape[-1]) != (_LATENT_DIM + _TILE, _LATENT_DIM):
        raise NotSupported("q", "rows of 512 + 64 values for impl='wgmma'", (o.shape[-1], width - o.shape[-1]))
    if fixed_split:
        raise NotSupported("fixed_split", "False for impl='wgmma'", fixed_split)
    grid = num_sms(q.device)
    parts = torch.empty(_PARTIALS * grid * _TILE * (_LATENT_DIM + 1), dtype=torch.float32, device=q.device)
    outputs = (o, lse, parts, parts[_PARTIALS * grid * _TILE * _LATENT_DIM :], _counters(q.device, grid))
    inputs = (
        tensor_map(q.data_ptr(), (num_streams, num_rows * num_heads, width), (1, _TILE, 64)),
        tensor_map(pages.data_ptr(), (pages.shape[0] * pages.shape[1], width), (_TILE, 64)),
        *(block_table, prefix_len, ancestors, num_nodes),
    )
    sizes = (num_streams, num_rows, num_heads, ancestors.shape[-1], block_table.shape[1])
    program = kernel(build_wgmma(q.dtype), "verify_attention_wgmma", q.device)
    program.launch(grid, _THREADS, *inputs, *outputs, *sizes, scale * math.log2(math.e), shared_bytes=_SHARED_BYTES)


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


_rings: dict[torch.device, tuple[Tensor, list[int]]] = {}


def _counters(device: torch.device, grid: int) -> Tensor:
    """Return counters that are zero: the kernel leaves them so, and calls take turns with the sets of a ring."""
    if device not in _rings:
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(grid, dtype=torch.int32, device=device)
        _rings[device] = (torch.zeros(_COUNTER_SETS, grid, dtype=torch.int32, device=device), [0])
        torch.cuda.synchronize(device)
    ring, turn = _rings[device]
    turn[0] = (turn[0] + 1) % _COUNTER_SETS
    return ring[turn[0]]
