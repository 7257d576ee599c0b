"""round_rows: before a round's verification, the roots' tokens and where each row stands in the text, in one launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_shape
from kdlab.errors import ShapeError, UnsupportedDevice
from kdlab.kernels import jit, reference
from kdlab.kernels.jit.ops import cuda_op

_THREADS = 128  # as in the .cu

BUILDS = (jit.Build("round_rows.cu"),)


class RoundRows(NamedTuple):
    """Where the rows of a round stand."""

    positions: Tensor  # [S, N] i32, absolute
    behind: Tensor  # [S, N] i64, of the token that is drawn behind each row
    num_rows: Tensor  # [S] i32, rows in use: none of a stream at rest


def round_rows(
    token: Tensor,
    depth: Tensor,
    num_nodes: Tensor,
    *,
    start: Tensor,
    anchor: Tensor,
    running: Tensor,
    impl: str = "auto",
) -> RoundRows:
    """Put each stream's anchor at the root of its tree, in place, and return where the rows stand.

    Args:
        token: [S, N] i32, tokens of the trees; column 0 is written.
        depth: [S, N] i32.
        num_nodes: [S] i32, nodes of each tree.
        start: [S] i32, committed rows of each stream.
        anchor: [S] i32, the token at that position.
        running: [S] i32, 1, or 0 where a stream rests.
        impl: "auto" (the kernel for CUDA tensors), "cuda" or "reference".

    Raises:
        ShapeError: the arguments do not fit one another. ArgumentError: an unknown impl. UnsupportedDevice: "cuda" for
            tensors on another device.
    """
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    if impl == "cuda" and not token.is_cuda:
        raise UnsupportedDevice(f"round_rows: impl 'cuda' needs CUDA tensors, token is on {token.device}")
    sizes = check_shape("token", token, ["S", "N"])
    if sizes["N"] < 1:
        raise ShapeError("token", "at least the roots", list(token.shape))
    per_stream = {"num_nodes": num_nodes, "start": start, "anchor": anchor, "running": running}
    for name, tensor in {"token": token, "depth": depth, **per_stream}.items():
        check_shape(name, tensor, [sizes["S"]] if name in per_stream else [*sizes.values()])
        if tensor.dtype != torch.int32 or tensor.device != token.device or not tensor.is_contiguous():
            got = f"{tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
            raise ShapeError(name, f"contiguous torch.int32 on {token.device}", got)
    run = reference.round_rows if impl == "reference" or not token.is_cuda else _round_rows
    return RoundRows(*run(token, depth, num_nodes, start, anchor, running))


@cuda_op("round_rows", mutates_args=("token",))
def _round_rows(
    token: Tensor, depth: Tensor, num_nodes: Tensor, start: Tensor, anchor: Tensor, running: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = _outputs(depth, num_nodes)
    streams, rows = token.shape
    if token.numel():
        read = (depth, num_nodes, start, anchor, running)
        kernel = jit.kernel(BUILDS[0], "round_rows", token.device)
        kernel.launch(streams, _THREADS, *read, token, *outputs, rows, overlap=True)
    return outputs


@_round_rows.register_fake
def _(_token: Tensor, depth: Tensor, num_nodes: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(depth, num_nodes)


def _outputs(depth: Tensor, num_nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(depth), torch.empty_like(depth, dtype=torch.int64), torch.empty_like(num_nodes)
