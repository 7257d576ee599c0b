"""embed_shard: one rank's summand of the embedding of tokens, where the vocabulary is split over ranks."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kdlab.checks import check_choice, check_dense, check_float_tensor, check_int, check_integer_tensor, check_shape
from kdlab.errors import ShapeError, UnsupportedDevice
from kdlab.kernels import jit
from kdlab.kernels.jit.ops import cuda_op

_THREADS, _WORD_BYTES = 256, 16  # as in the .cu
_TOKEN_DTYPES = torch.int32, torch.int64
BUILD = jit.Build("embed_shard.cu")
BUILDS = (BUILD,)


def embed_shard(tokens: Tensor, weight: Tensor, *, first_id: int, impl: str = "auto") -> Tensor:
    """Return the rows of a vocabulary shard that tokens name, and zeros for tokens of other shards.

    Args:
        tokens: [...] i32 or i64 (the reference takes any integers), global ids.
        weight: [Vs, D] of any float dtype, on a GPU contiguous.
        first_id: the global id of row 0.
        impl: "auto" (the kernel for CUDA tensors in rows of whole 16-byte words, the reference for others), "cuda" or
            "reference".

    Returns:
        [..., D] in the weight's dtype.

    Raises:
        ShapeError: a wrong dtype, shape or layout. UnsupportedDevice: "cuda" for tensors on another device.
        ArgumentError: an unknown impl, or a negative `first_id`.
    """
    if _use_kernel("tokens", tokens, weight, first_id, impl):
        return _embed_shard(tokens.contiguous(), weight, first_id, 1, 0)
    own = tokens.long() - first_id
    elsewhere = (own < 0) | (own >= len(weight))
    return F.embedding(own.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0)


def embed_blocks(
    anchor: Tensor, weight: Tensor, *, first_id: int, block_size: int, mask_id: int, impl: str = "auto"
) -> Tensor:
    """Return what `embed_shard` does of blocks that are an anchor and mask tokens behind it.

    Args:
        anchor: [S] i32 or i64, global ids.
        weight, first_id, impl: as for `embed_shard`.
        block_size: b, tokens of a block, the anchor among them.
        mask_id: the global id of the mask token.

    Returns:
        [S, b, D] in the weight's dtype.

    Raises:
        As `embed_shard`.
    """
    check_shape("anchor", anchor, ["S"])
    block_size = check_int("block_size", block_size, minimum=1)
    mask_id = check_int("mask_id", mask_id, minimum=0)
    if _use_kernel("anchor", anchor, weight, first_id, impl):
        return _embed_shard(anchor.contiguous(), weight, first_id, block_size, mask_id).unflatten(0, (-1, block_size))
    return embed_shard(make_blocks(anchor, block_size, mask_id), weight, first_id=first_id, impl=impl)


def make_blocks(anchor: Tensor, block_size: int, mask_id: int) -> Tensor:
    """Return blocks [S, b] i64 of an anchor [S] int and b - 1 mask tokens each."""
    block = torch.full((len(anchor), block_size), mask_id, device=anchor.device)
    block[:, 0] = anchor
    return block


def _use_kernel(name: str, tokens: Tensor, weight: Tensor, first_id: int, impl: str) -> bool:
    """Say whether the kernel runs; raise where it was asked for and cannot."""
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    check_int("first_id", first_id, minimum=0)
    check_dense(name, tokens)
    check_integer_tensor(name, tokens)
    width = check_shape("weight", weight, ["Vs", "D"])["D"]
    check_float_tensor("weight", weight)
    if impl == "cuda" and not weight.is_cuda:
        raise UnsupportedDevice(f"embed_shard: impl 'cuda' needs CUDA tensors, weight is on {weight.device}")
    if tokens.device != weight.device:
        raise ShapeError(name, f"on {weight.device}, as the weight", tokens.device)
    # Storages begin at multiples of 512 bytes; the op looks at the address itself.
    starts_at = weight.storage_offset() * weight.element_size()
    in_words = has_kernel(width, weight.dtype) and weight.is_contiguous() and starts_at % _WORD_BYTES == 0
    if impl == "cuda" and not in_words:
        got = f"{list(weight.shape)} {weight.dtype}, offset {weight.storage_offset()}"
        raise ShapeError("weight", "contiguous rows of whole 16-byte words", got)
    if impl == "cuda" and tokens.dtype not in _TOKEN_DTYPES:
        raise ShapeError(name, "int32 or int64 for impl='cuda'", tokens.dtype)
    return impl != "reference" and weight.is_cuda and in_words and tokens.dtype in _TOKEN_DTYPES


def has_kernel(width: int, dtype: torch.dtype) -> bool:
    """Say whether the kernel copies rows of `width` values that lie side by side."""
    return width * dtype.itemsize % _WORD_BYTES == 0


@cuda_op("embed_shard")
def _embed_shard(tokens: Tensor, weight: Tensor, first_id: int, each: int, filler: int) -> Tensor:
    if weight.data_ptr() % _WORD_BYTES:
        raise ShapeError("weight", f"data at a multiple of {_WORD_BYTES} bytes", hex(weight.data_ptr()))
    out = _output(tokens, weight, each)
    if tokens.numel():
        words = weight.shape[1] * weight.element_size() // _WORD_BYTES
        table = (weight, len(weight), np.int64(first_id), words)
        jit.kernel(BUILD, "embed_shard", weight.device).launch(
            tokens.numel() * each, _THREADS, tokens, int(tokens.dtype == torch.int64), each, np.int64(filler), *table,
            out, overlap=True,
        )  # fmt: skip
    return out


@_embed_shard.register_fake
def _(tokens: Tensor, weight: Tensor, _first_id: int, each: int, _filler: int) -> Tensor:
    return _output(tokens, weight, each)


def _output(tokens: Tensor, weight: Tensor, each: int) -> Tensor:
    shape = tokens.shape if each == 1 else (tokens.numel() * each,)
    return weight.new_empty(*shape, weight.shape[1])
