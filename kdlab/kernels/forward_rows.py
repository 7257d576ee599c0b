"""forward_rows: which rows of a forward are in use, their tokens, and the tables that turn them, in one launch."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import check_choice, check_integer_tensor, check_shape
from kdlab.config import RopeConfig
from kdlab.errors import NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import jit
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.rope import frequencies_on, rope_tables

_MAX_PAIRS = 1024  # a thread each
_DTYPES = torch.int32, torch.int64  # that the kernel reads

BUILDS = (jit.Build("forward_rows.cu"),)


class ForwardRows(NamedTuple):
    """What a forward knows of its rows before the first layer."""

    tokens: Tensor  # [S, N] int, 0 in rows that are not in use
    used: Tensor  # [S, N] bool
    cos: Tensor  # [S, N, R/2] f32, of `rope_tables`
    sin: Tensor  # [S, N, R/2] f32


def forward_rows(
    tokens: Tensor, positions: Tensor, num_rows: Tensor, rope: RopeConfig, *, impl: str = "auto"
) -> ForwardRows:
    """Return what a forward asks of its rows before the first layer.

    Args:
        tokens: [S, N] i32 or i64 (the reference takes any integers); those of rows not in use may be any.
        positions: [S, N] int alike, absolute.
        num_rows: [S] i32, rows in use, the first ones.
        rope: the constants.
        impl: "auto" (the kernel for CUDA tensors), "cuda" or "reference".

    Raises:
        ShapeError: the arguments do not fit one another, or the kernel cannot read them. ArgumentError: an unknown
            impl. UnsupportedDevice: "cuda" for tensors on another device. NotSupported: more pairs than a block holds.
    """
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    sizes = check_shape("tokens", tokens, ["S", "N"])
    check_shape("positions", positions, [sizes["S"], sizes["N"]])
    check_shape("num_rows", num_rows, [sizes["S"]])
    named = {"tokens": tokens, "positions": positions, "num_rows": num_rows}
    for name, tensor in named.items():
        check_integer_tensor(name, tensor)
        if tensor.device != tokens.device:
            raise ShapeError(name, f"on {tokens.device}, as tokens", tensor.device)
    if impl == "cuda" and not tokens.is_cuda:
        raise UnsupportedDevice(f"forward_rows: impl 'cuda' needs CUDA tensors, tokens are on {tokens.device}")
    if impl == "reference" or not tokens.is_cuda:
        used = torch.arange(sizes["N"], device=tokens.device) < num_rows[:, None]
        return ForwardRows(torch.where(used, tokens, 0), used, *rope_tables(positions, rope))
    for name, tensor in named.items():
        wanted = _DTYPES[:1] if name == "num_rows" else _DTYPES
        if tensor.dtype not in wanted:
            raise ShapeError(name, " or ".join(map(str, wanted)), tensor.dtype)
    if not 1 <= rope.dim // 2 <= _MAX_PAIRS:
        raise NotSupported("rope.dim", f"2 to {2 * _MAX_PAIRS}", rope.dim)
    frequencies = frequencies_on(rope, tokens.device)
    rows = (tensor.contiguous() for tensor in named.values())
    return ForwardRows(*_forward_rows(*rows, frequencies, rope.amplitude))


def forward_rows_cost(num_rows: int, rope_dim: int) -> Cost:
    """Return the cost of `num_rows` rows, tokens and positions of 4 bytes: the tables written once."""
    return Cost(num_rows * (3 * 4 + 1 + 4 * rope_dim) + 8 * (rope_dim // 2))


@cuda_op("forward_rows")
def _forward_rows(
    tokens: Tensor, positions: Tensor, num_rows: Tensor, frequencies: Tensor, amplitude: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = _outputs(tokens, frequencies)
    streams, rows = tokens.shape
    if tokens.numel():
        wide = (int(tokens.dtype == torch.int64), int(positions.dtype == torch.int64))
        read = (tokens, positions, num_rows, frequencies)
        jit.kernel(BUILDS[0], "forward_rows", tokens.device).launch(
            (rows, streams), len(frequencies), *read, *outputs, np.float64(amplitude), *wide, overlap=True
        )
    return outputs


@_forward_rows.register_fake
def _(tokens: Tensor, _positions: Tensor, _num_rows: Tensor, frequencies: Tensor, *_: object) -> tuple[Tensor, ...]:
    return _outputs(tokens, frequencies)


def _outputs(tokens: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cos = frequencies.new_empty(*tokens.shape, len(frequencies), dtype=torch.float32)
    used = torch.empty(tokens.shape, dtype=torch.bool, device=tokens.device)
    return torch.empty_like(tokens), used, cos, torch.empty_like(cos)
