"""stream_advance: after a round, each stream's place, anchor and end, in one launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_int, check_shape
from kdlab.errors import ShapeError, UnsupportedDevice
from kdlab.kernels import jit, reference
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.reference import NO_STOP

__all__ = ["NO_STOP", "Advance", "stream_advance", "stream_advance_cost"]

_MAX_TAIL = 2**20
_WARP = 32

BUILDS = (jit.Build("stream_advance.cu"),)


class Advance(NamedTuple):
    """What a round commits of each stream; nothing of one that rests or whose round failed."""

    start: Tensor  # [S] i32, committed rows before the round
    path: Tensor  # [S, L+1] i32, rows of the tree, root first, -1 padded
    num_rows: Tensor  # [S] i32, rows of the path


def stream_advance(
    token: Tensor,
    path: Tensor,
    length: Tensor,
    bonus: Tensor,
    status: Tensor,
    *,
    is_stop: Tensor,
    cap: Tensor,
    start: Tensor,
    anchor: Tensor,
    running: Tensor,
    num_tokens: Tensor,
    stop: Tensor,
    tail: int,
    impl: str = "auto",
) -> Advance:
    """Take over what a round accepted, in place, and let a stream rest that has its tokens or whose round failed.

    Args:
        token: [S, N] i32, tokens of the trees.
        path: [S, L+1] i32, accepted rows, root first, -1 padded.
        length: [S] i32, accepted draft tokens.
        bonus: [S] i32, the target's token behind them; negative where it has none.
        status: [S] i32, 0 where the tree was good.
        is_stop: [V] bool, tokens that end an output.
        cap: [S] i32, most new tokens.
        start: [S] i32, committed rows; counted on.
        anchor: [S] i32, becomes the bonus.
        running: [S] i32, 1, or 0 where a stream rests.
        num_tokens: [S] i32, new tokens so far; counted on.
        stop: [S] i32, place of the first stop token before the cap among the new tokens, or NO_STOP.
        tail: tokens wanted past the stop or the cap.
        impl: "auto" (the kernel for CUDA tensors), "cuda" or "reference".

    Returns:
        Advance.

    Raises:
        ShapeError: the arguments do not fit one another. ArgumentError: an unknown impl, a tail that is no count.
        UnsupportedDevice: "cuda" for tensors on another device.
    """
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    if impl == "cuda" and not token.is_cuda:
        raise UnsupportedDevice(f"stream_advance: impl 'cuda' needs CUDA tensors, token is on {token.device}")
    tail = check_int("tail", tail, minimum=0, maximum=_MAX_TAIL)
    read = {"length": length, "bonus": bonus, "status": status, "cap": cap}
    written = {"start": start, "anchor": anchor, "running": running, "num_tokens": num_tokens, "stop": stop}
    _check(token, path, is_stop, read | written)
    run = reference.stream_advance if impl == "reference" or not token.is_cuda else _stream_advance
    accepted = (token, path, length, bonus, status)
    return Advance(*run(*accepted, is_stop, cap, start, anchor, running, num_tokens, stop, tail))


def stream_advance_cost(num_streams: int, depth_limit: int) -> Cost:
    """Return the cost of `num_streams` streams with paths of `depth_limit` + 1 rows."""
    return Cost(4 * num_streams * (3 * (depth_limit + 1) + 16))


def _check(token: Tensor, path: Tensor, is_stop: Tensor, per_stream: dict[str, Tensor]) -> None:
    streams = check_shape("token", token, ["S", "N"])["S"]
    check_shape("path", path, [streams, "L+1"])
    check_shape("is_stop", is_stop, ["V"])
    for name, tensor in per_stream.items():
        check_shape(name, tensor, [streams])
    for name, tensor in {"token": token, "path": path, "is_stop": is_stop, **per_stream}.items():
        wanted = torch.bool if name == "is_stop" else torch.int32
        if tensor.dtype != wanted or tensor.device != token.device or not tensor.is_contiguous():
            got = f"{tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
            raise ShapeError(name, f"contiguous {wanted} on {token.device}", got)


@cuda_op("stream_advance", mutates_args=("start", "anchor", "running", "num_tokens", "stop"))
def _stream_advance(
    token: Tensor,
    path: Tensor,
    length: Tensor,
    bonus: Tensor,
    status: Tensor,
    is_stop: Tensor,
    cap: Tensor,
    start: Tensor,
    anchor: Tensor,
    running: Tensor,
    num_tokens: Tensor,
    stop: Tensor,
    tail: int,
) -> tuple[Tensor, Tensor, Tensor]:
    before, committed, num_rows = torch.empty_like(start), torch.empty_like(path), torch.empty_like(start)
    streams, path_len = path.shape
    if streams:
        kernel = jit.kernel(BUILDS[0], "stream_advance", token.device)
        tensors = (token, path, length, bonus, status, is_stop, cap, start, anchor, running, num_tokens, stop)
        sizes = (token.shape[1], path_len, len(is_stop), tail)
        kernel.launch(streams, _WARP, *tensors, before, committed, num_rows, *sizes, overlap=True)
    return before, committed, num_rows


@_stream_advance.register_fake
def _(token: Tensor, path: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return path.new_empty(path.shape[0]), torch.empty_like(path), path.new_empty(path.shape[0])
