"""pack_words: tensors of several dtypes side by side as 32-bit words, a row a stream, in one launch."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_shape
from kdlab.errors import ArgumentError, ShapeError, UnsupportedDevice
from kdlab.kernels import jit
from kdlab.kernels.jit.ops import cuda_op

MAX_FIELDS = 20
_THREADS, _KIND_BITS = 256, 2  # as in the .cu
_KINDS = {torch.int32: 0, torch.float32: 0, torch.uint32: 0, torch.bool: 1, torch.int64: 2}

BUILDS = (jit.Build("pack_words.cu"),)


def pack_words(fields: Sequence[Tensor], out: Tensor, *, impl: str = "auto") -> None:
    """Write tensors side by side, in place: values of 4 bytes by their bits, bool as 0 or 1, i64 as i32.

    Args:
        fields: [S, ...] contiguous each, i32, f32, uint32, bool or i64 whose values fit 32 bits; at most 20.
        out: [S, W] i32, as wide as the fields together.
        impl: "auto" (the kernel for CUDA tensors), "cuda" or "reference".

    Raises:
        ShapeError: a field does not fit. ArgumentError: too many fields, or an unknown impl. UnsupportedDevice: "cuda"
            for tensors on another device.
    """
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    if impl == "cuda" and not out.is_cuda:
        raise UnsupportedDevice(f"pack_words: impl 'cuda' needs CUDA tensors, out is on {out.device}")
    streams, words = check_shape("out", out, ["S", "W"]).values()
    if not 1 <= len(fields) <= MAX_FIELDS:
        raise ArgumentError("fields", f"1 to {MAX_FIELDS}", len(fields))
    for i, field in enumerate(fields):
        if not isinstance(field, Tensor):
            raise ShapeError(f"fields[{i}]", "a tensor", type(field).__name__)
        if field.dtype not in _KINDS or field.device != out.device or not field.is_contiguous():
            got = f"{field.dtype} on {field.device}, strides {field.stride()}"
            raise ShapeError(f"fields[{i}]", f"contiguous words, bool or int64 on {out.device}", got)
        if field.dim() < 1 or len(field) != streams:
            raise ShapeError(f"fields[{i}]", f"[{streams}, ...]", list(field.shape))
    if sum(map(_width, fields)) != words or out.dtype != torch.int32 or not out.is_contiguous():
        wanted = f"contiguous torch.int32 [{streams}, {sum(map(_width, fields))}]"
        raise ShapeError("out", wanted, f"{out.dtype} {list(out.shape)}, strides {out.stride()}")
    read = [field.view(torch.int32) if _KINDS[field.dtype] == 0 else field for field in fields]
    if impl == "reference" or not out.is_cuda:
        torch.cat([field.int().reshape(streams, _width(field)) for field in read], dim=1, out=out)
    else:
        _pack_words(read, out)


def _width(field: Tensor) -> int:
    return math.prod(field.shape[1:])


@cuda_op("pack_words", mutates_args=("out",))
def _pack_words(fields: list[Tensor], out: Tensor) -> None:
    streams, words = out.shape
    if not out.numel():
        return
    begins = accumulate(map(_width, fields[:-1]), initial=0)
    args: list[object] = []
    for field, begin in zip(fields, begins, strict=True):
        args += (field, begin << _KIND_BITS | _KINDS[field.dtype])
    args += (None, words << _KIND_BITS) * (MAX_FIELDS - len(fields))
    grid = (-(-words // _THREADS), streams)
    jit.kernel(BUILDS[0], "pack_words", out.device).launch(grid, _THREADS, *args, words, out, overlap=True)


@_pack_words.register_fake
def _(*_: object) -> None:
    """`out` is written in place: there is nothing to describe."""
