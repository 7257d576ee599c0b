"""The router's product, in parts over the inputs that `router_choose` adds up: by a kernel, or by the library.

There are few outputs and many inputs: parts of the inputs are what makes work for a whole GPU. For more rows than the
kernel takes, the library is given the parts as a batch; left alone it takes 9.7 us for 264 rows, in parts 6.8, and 22.4
and 11.0 for 1,056.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from kdlab.errors import NotSupported, ShapeError
from kdlab.kernels import jit
from kdlab.kernels.constants import DTYPE_DEFINE, MMA_DTYPES
from kdlab.kernels.jit.layouts import by_layout
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.library_linear import library_parts
from kdlab.kernels.skinny_linear import skinny_linear

MAX_ROWS = 144
ROWS = (8, 16, 24, 40, 72)  # of a block, as few as hold T; from 73 on two blocks share the rows
_ARCHS = ("sm_90a", "sm_100a", "sm_120a")  # with bulk copies
_FEATURES, _INPUTS = 64, 448  # of a block, as in the .cu
_MOST_PARTS = 16  # that `router_choose` holds in registers
_ALIGNMENT = 16
_MAX_CLUSTER = 8


def gate_parts(x: Tensor, weight: Tensor, impl: str) -> Tensor:
    """Multiply x by weight on a GPU, in parts over neighbouring inputs.

    Args:
        x: [T, D] float; rows may be strided.
        weight: [E, D] in x's dtype.
        impl: "auto", or "cuda", which leaves nothing to the library; see `skinny_linear`.

    Returns:
        [S, T, E] f32, whose sum over S is x W^T. S, and so the order in which a row is summed, is one for all T up to
        MAX_ROWS where `has_gate`; beyond it depends on T.

    Raises:
        As `skinny_linear`.
    """
    if has_gate(x, weight):
        return router_gate(x, weight)
    parts = _num_parts(x) if impl == "auto" else 1
    if parts == 1:
        return skinny_linear(x, weight, dtype=torch.float32, impl=impl).unsqueeze(0)
    return library_parts(x, weight, parts)


def _num_parts(x: Tensor) -> int:
    """Return in how many parts the library multiplies x: as measured on an H200, 1 for what was not."""
    parts = 8 if len(x) <= 400 else 4
    fits = x.dtype in MMA_DTYPES and len(x) > MAX_ROWS and x.shape[1] % (parts * _INPUTS) == 0
    return parts if fits else 1


@by_layout
def has_gate(x: Tensor, weight: Tensor) -> bool:
    """Say whether the kernel runs for x [T, D] and weight [E, D]: in one dtype, on one GPU, as its copies want them."""
    (rows, width), experts = x.shape, weight.shape[0]
    if x.dtype not in MMA_DTYPES or not 1 <= rows <= MAX_ROWS:
        return False
    if (weight.shape[1], weight.dtype, weight.device) != (width, x.dtype, x.device):
        return False
    if experts % _FEATURES or width % _INPUTS or not 1 <= width // _INPUTS <= _MOST_PARTS:
        return False
    # Storages begin at multiples of 512 bytes; the op looks at the addresses themselves.
    places = (x.stride(0), weight.stride(0), x.storage_offset(), weight.storage_offset())
    if x.stride(1) != 1 or weight.stride(1) != 1 or any(n * x.itemsize % _ALIGNMENT for n in places):
        return False
    return jit.arch_of(x.device) in _ARCHS


@functools.lru_cache(maxsize=16)
def build(dtype: torch.dtype, block_rows: int) -> jit.Build:
    """Return what is compiled for so many rows of a block, one of ROWS."""
    defines = (("DTYPE", DTYPE_DEFINE[dtype]), ("ROWS", block_rows))
    return jit.Build("router_gate.cu", defines, _ARCHS, (("router_gate", _shared_bytes(block_rows)),))


def _shared_bytes(block_rows: int) -> int:
    """Return the dynamic shared memory of a block: its rows of x, sums of half of the warps, a barrier."""
    return block_rows * (2 * _INPUTS + 64) + 4 * block_rows * _FEATURES + _ALIGNMENT


@cuda_op("router_gate")
def router_gate(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x by weight by the kernel, in parts of 448 neighbouring inputs.

    Weights are read before the kernel ahead in the stream has ended: nothing may have written them just before.

    Args:
        x: [T, D] bfloat16 or float16; rows may be strided.
        weight: [E, D] in x's dtype; rows may be strided.

    Returns:
        [D / 448, T, E] f32, whose sum over the first axis is x W^T.

    Raises:
        NotSupported: what `has_gate` says no to. ShapeError: x or weight at an odd address.
    """
    if not has_gate(x, weight):
        wanted = f"1 to {MAX_ROWS} 16-bit rows, inputs by {_INPUTS} and outputs by {_FEATURES}, on one of {_ARCHS}"
        raise NotSupported("router_gate", wanted, (x.dtype, tuple(x.shape), tuple(weight.shape)))
    if (x.data_ptr() | weight.data_ptr()) % _ALIGNMENT:
        found = tuple(matrix.data_ptr() % _ALIGNMENT for matrix in (x, weight))
        raise ShapeError("x and weight", f"storage at multiples of {_ALIGNMENT} bytes", f"{found} bytes behind one")
    (rows, width), experts = x.shape, weight.shape[0]
    parts = x.new_empty(width // _INPUTS, rows, experts, dtype=torch.float32)
    block_rows = next((n for n in ROWS if n >= rows), ROWS[-1])
    tiles = experts // _FEATURES
    cluster = max(n for n in range(1, _MAX_CLUSTER + 1) if tiles % n == 0)
    jit.kernel(build(x.dtype, block_rows), "router_gate", x.device).launch(
        (tiles, width // _INPUTS, -(-rows // block_rows)),
        256 if block_rows == ROWS[0] else 128,  # as in the .cu
        *(x, weight, parts, rows, experts, np.int64(x.stride(0)), np.int64(weight.stride(0))),
        shared_bytes=_shared_bytes(block_rows),
        cluster=None if cluster == 1 else cluster,
        overlap=True,
    )
    return parts


@router_gate.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[1] // _INPUTS, x.shape[0], weight.shape[0], dtype=torch.float32)


BUILDS = tuple(build(torch.bfloat16, rows) for rows in ROWS)
