"""tree_accept: every link of the draft trees checked, then the target followed from the root, in one launch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdlab.checks import MAX_TOKEN, check_int, check_integer_tensor, check_shape
from kdlab.errors import NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import jit
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit.ops import cuda_op

MAX_TREE_ROWS = 1025
_MAX_DEPTH_LIMIT = 1 << 20


def _num_slots(num_rows: int) -> int:
    """Return the size of the table of children, the power of two that the draft rows fill at most half."""
    return 1 << max(2 * (num_rows - 1) - 1, 1).bit_length()


def _shared_bytes(num_rows: int) -> int:
    """Return the dynamic shared memory of a block, `Plan` in the .cu."""
    return 9 * 4 * num_rows + (8 + 4 * 4) * _num_slots(num_rows)


_MOST_SHARED_BYTES = _shared_bytes(MAX_TREE_ROWS)
BUILDS = (jit.Build("tree_accept.cu", shared_bytes=(("tree_accept", _MOST_SHARED_BYTES),)),)


class AcceptArrays(NamedTuple):
    """What `kdlab.tree.Acceptance` holds, which explains it."""

    path: Tensor  # [S, L+1] i32
    length: Tensor  # [S] i32
    bonus: Tensor  # [S] i32
    status: Tensor  # [S] i32


def tree_accept(
    token: Tensor,
    parent: Tensor,
    depth: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    num_nodes: Tensor,
    target_tokens: Tensor,
    depth_limit: int,
) -> AcceptArrays:
    """Walk from each root to the child that carries the target's token of the row, as `kdlab.tree.accept` does.

    Args:
        token, parent, depth, first_child, next_sibling: [S, N] i32 on a GPU, the arrays of a DraftTree, or anything.
        num_nodes: [S] i32.
        target_tokens: [S, N] int, the target's token after each row; negative ones match nothing.
        depth_limit: L, rows that a path has at most below the root.

    Returns:
        AcceptArrays; a malformed tree gets its status, a path of -1, length 0 and bonus -1.

    Raises:
        ShapeError: the arguments do not fit one another.
        ArgumentError: `depth_limit` is no count up to 2^20.
        NotSupported: N above 1,025.
        UnsupportedDevice: no GPU that kdlab compiles for.
    """
    depth_limit = check_int("depth_limit", depth_limit, minimum=0, maximum=_MAX_DEPTH_LIMIT)
    tree = {
        "token": token,
        "parent": parent,
        "depth": depth,
        "first_child": first_child,
        "next_sibling": next_sibling,
        "num_nodes": num_nodes,
    }
    _check(tree, target_tokens)
    if target_tokens.dtype != torch.int32:
        target_tokens = target_tokens.long().clamp(-1, MAX_TOKEN).int()  # 16 bits do not hold the limits
    arrays = (tensor.contiguous() for tensor in tree.values())
    return AcceptArrays(*_tree_accept(*arrays, target_tokens.contiguous(), depth_limit))


def tree_accept_impl(num_rows: int, device: torch.device) -> str:
    """Return what `kdlab.tree.accept` runs as when left to choose: "cuda", or "reference", torch on any device.

    Args:
        num_rows: N.
        device: of the trees.
    """
    return "cuda" if device.type == "cuda" and 1 <= num_rows <= MAX_TREE_ROWS else "reference"


def _check(tree: dict[str, Tensor], target_tokens: Tensor) -> None:
    token = tree["token"]
    sizes = check_shape("token", token, ["S", "N"])
    if not token.is_cuda:
        raise UnsupportedDevice(f"tree_accept: the kernel needs CUDA tensors, token is on {token.device}")
    if not 1 <= sizes["N"] <= MAX_TREE_ROWS:
        raise NotSupported("token", f"1 to {MAX_TREE_ROWS} rows a tree", list(token.shape))
    for name, tensor in (*tree.items(), ("target_tokens", target_tokens)):
        check_shape(name, tensor, [sizes["S"]] if name == "num_nodes" else list(token.shape))
        if tensor.device != token.device:
            raise ShapeError(name, f"on {token.device}", tensor.device)
        if name in tree and tensor.dtype != torch.int32:
            raise ShapeError(name, "int32", tensor.dtype)
    check_integer_tensor("target_tokens", target_tokens)


def tree_accept_cost(num_streams: int, num_rows: int, depth_limit: int) -> Cost:
    """Return the cost of reading S trees of N rows with the target's tokens and writing paths of L + 1 rows."""
    return Cost(4 * num_streams * (6 * num_rows + 1 + depth_limit + 1 + 3))


@cuda_op("tree_accept")
def _tree_accept(
    token: Tensor,
    parent: Tensor,
    depth: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    num_nodes: Tensor,
    target_tokens: Tensor,
    depth_limit: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = _new_arrays(token, depth_limit)
    streams, rows = token.shape
    if streams:
        threads = min(-(-rows // 32) * 32, 1024)
        slots = _num_slots(rows)
        inputs = (token, parent, depth, first_child, next_sibling, num_nodes, target_tokens)
        kernel = jit.kernel(BUILDS[0], "tree_accept", token.device)
        sizes = (rows, slots, depth_limit)
        kernel.launch(streams, threads, *inputs, *out, *sizes, shared_bytes=_shared_bytes(rows), overlap=True)
    return out


@_tree_accept.register_fake
def _(token: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _new_arrays(token, depth_limit=others[-1])


def _new_arrays(token: Tensor, depth_limit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what an AcceptArrays holds, not filled."""
    streams = token.shape[0]
    path, *others = (token.new_empty(shape) for shape in ((streams, depth_limit + 1), *[(streams,)] * 3))
    return path, others[0], others[1], others[2]
