"""Launch of the teaching kernel: one warp a (row, head), the cache read again for every head."""

import math

import torch
from torch import Tensor

from kdlab.errors import NotSupported
from kdlab.kernels.constants import DTYPE_DEFINE
from kdlab.kernels.jit import Build, kernel

_WARPS = 4
_MAX_WIDTH = 1024  # 32 values a lane


def build_naive(dtype: torch.dtype, latent_dim: int, rope_dim: int) -> Build:
    """Return the build of one dtype and one pair of widths."""
    defines = (("DTYPE", DTYPE_DEFINE[dtype]), ("LATENT", latent_dim), ("ROPE", rope_dim))
    return Build("verify_attention_naive.cu", defines)


BUILDS = tuple(build_naive(dtype, 512, 64) for dtype in DTYPE_DEFINE)


def run_naive(
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
    """Fill o and lse; shapes as in `verify_attention`, all tensors contiguous. Nothing is ever split.

    Raises:
        NotSupported: float64, or rows of more than 1,024 values.
    """
    num_streams, num_rows, num_heads, width = q.shape
    if q.dtype not in DTYPE_DEFINE:
        raise NotSupported("q", "float32, bfloat16 or float16 for impl='naive'", q.dtype)
    if width > _MAX_WIDTH:
        raise NotSupported("q", f"rows of at most {_MAX_WIDTH} values for impl='naive'", width)
    latent_dim = o.shape[-1]
    program = kernel(build_naive(q.dtype, latent_dim, width - latent_dim), "verify_attention_naive", q.device)
    inputs = (q, pages, block_table, prefix_len, ancestors, num_nodes)
    sizes = (num_rows, num_heads, ancestors.shape[-1], block_table.shape[1], pages.shape[0])
    grid = (-(-num_rows * num_heads // _WARPS), num_streams)
    program.launch(grid, 32 * _WARPS, *inputs, o, lse, *sizes, scale * math.log2(math.e))
