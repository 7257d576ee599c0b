"""add_norm: residual addition and RMSNorm of a few rows in one launch."""

import functools

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import check_choice, check_float_tensor, check_shape
from kdlab.errors import NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import jit, reference
from kdlab.kernels.constants import DTYPE_DEFINE
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit.layouts import by_layout
from kdlab.kernels.jit.ops import cuda_op

_WORD_BYTES = 16
_FEW_WORDS, _MAX_THREADS = 256, 1024
"""Words of a row up to which a thread takes one; else it takes two. Of 7,168 values at 1 and 33 rows an H200 takes 1.59
and 1.70 us with two words a thread, 1.67 and 1.79 us with four, 1.73 and 1.84 us with one."""


def add_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, eps: float, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Add an update to the residual stream and norm the sum; without an update, norm x.

    Args:
        x: [T, D] float32, bfloat16 or float16 (the reference takes any float); rows may be strided.
        update: [T, D] in x's dtype, or None.
        weight: [D] in x's dtype.
        eps: added to the mean square.
        impl: "auto" (the kernel for CUDA tensors it takes, the reference for others), "cuda" or "reference".

    Returns:
        The sum [T, D], x itself without an update, and its norm [T, D], both in x's dtype: the sum is rounded, the
        mean square is float32, and the normed value is rounded before the weight multiplies it.

    Raises:
        ShapeError: the arguments do not fit one another. NotSupported: impl "cuda" for what the kernel does not take.
        UnsupportedDevice: "cuda" for tensors on another device. ArgumentError: an unknown impl.
    """
    if not _runs_kernel(x, update, weight, impl):
        return reference.add_norm(x, update, weight, eps)
    if update is None:
        return x, _norm(x, weight, eps)
    return _add_norm(x, update, weight, eps)


@by_layout
def _runs_kernel(x: Tensor, update: Tensor | None, weight: Tensor, impl: str) -> bool:
    """Check the arguments of `add_norm`; say whether the kernel runs."""
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    if impl == "cuda" and not x.is_cuda:
        raise UnsupportedDevice(f"add_norm: impl 'cuda' needs CUDA tensors, x is on {x.device}")
    sizes = check_shape("x", x, ["T", "D"])
    check_float_tensor("x", x)
    others = {"weight": weight} if update is None else {"weight": weight, "update": update}
    check_shape("weight", weight, [sizes["D"]])
    if update is not None:
        check_shape("update", update, [sizes["T"], sizes["D"]])
    for name, tensor in others.items():
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise ShapeError(name, f"{x.dtype} on {x.device}, as x", f"{tensor.dtype} on {tensor.device}")
    problem = _unsupported(x, update, weight)
    if impl == "cuda" and problem:
        raise NotSupported("x", "float32, bfloat16 or float16 in rows of whole 16-byte words", problem)
    return impl != "reference" and x.is_cuda and problem is None


def add_norm_cost(num_rows: int, width: int, *, update: bool = True, itemsize: int = 2) -> Cost:
    """Return the cost of `num_rows` rows: x, the update, the sum and the norm once, and the weight."""
    return Cost(((4 if update else 2) * num_rows + 1) * width * itemsize)


def has_kernel(width: int, dtype: torch.dtype) -> bool:
    """Say whether the kernel takes rows of `width` values that lie side by side."""
    return dtype in DTYPE_DEFINE and width > 0 and width * dtype.itemsize % _WORD_BYTES == 0


def _unsupported(x: Tensor, update: Tensor | None, weight: Tensor) -> str | None:
    if not has_kernel(x.shape[1], x.dtype):
        return f"{tuple(x.shape)} {x.dtype}"
    for tensor in (weight, x) if update is None else (weight, x, update):
        places = (*tensor.stride()[:-1], tensor.storage_offset())
        if tensor.stride(-1) != 1 or any(n * x.element_size() % _WORD_BYTES for n in places):
            return f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, offset {tensor.storage_offset()}"
    return None


@functools.lru_cache(maxsize=64)
def build(width: int, dtype: torch.dtype) -> jit.Build:
    """Return what is compiled for rows of `width` values."""
    defines = {"DTYPE": DTYPE_DEFINE[dtype], "ROW_WIDTH": width, "NUM_THREADS": threads(width, dtype)}
    return jit.Build("add_norm.cu", tuple(defines.items()))


def threads(width: int, dtype: torch.dtype) -> int:
    """Return the threads of a block, which share the words of a row evenly."""
    words = -(-width * dtype.itemsize // _WORD_BYTES)
    each = 1 if words <= _FEW_WORDS else max(2, -(-words // _MAX_THREADS))
    return -(-words // (each * 32)) * 32


def _launch(name: str, x: Tensor, *args: object) -> None:
    if len(x):
        kernel = jit.kernel(build(x.shape[1], x.dtype), name, x.device)
        kernel.launch(len(x), threads(x.shape[1], x.dtype), x, *args, overlap=True)


@cuda_op("add_norm")
def _add_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, out = x.new_empty(x.shape), x.new_empty(x.shape)
    strides = (np.int64(x.stride(0)), np.int64(update.stride(0)))
    _launch("add_norm", x, update, weight, total, out, *strides, float(eps))
    return total, out


@_add_norm.register_fake
def _(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@cuda_op("norm")
def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = x.new_empty(x.shape)
    _launch("norm_rows", x, weight, out, np.int64(x.stride(0)), float(eps))
    return out


@_norm.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


BUILDS = (*(build(7168, dtype) for dtype in DTYPE_DEFINE), build(1536, torch.bfloat16))
