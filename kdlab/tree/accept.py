"""Acceptance: follow the target's own tokens from the root down the draft tree."""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_shape, check_token_tensor
from kdlab.errors import ShapeError
from kdlab.kernels.tree_accept import tree_accept, tree_accept_impl
from kdlab.tree.draft_tree import DraftTree


class AcceptStatus(IntEnum):
    """What `accept` found in a stream; anything but OK means that nothing of the stream was accepted."""

    OK = 0
    BAD_SIZE = 1  # num_nodes is not from 1 to N
    BAD_PARENT = 2  # row 0 has a parent, or a parent lies outside the tree
    BAD_ORDER = 3  # a parent does not stand before its child: a cycle, or rows out of order
    BAD_DEPTH = 4  # a depth is not its parent's plus one, or is above depth_limit
    BAD_TOKEN = 5  # a draft token is negative
    BAD_LINK = 6  # first_child and next_sibling do not list each node's children once, in row order
    DUPLICATE_CHILD = 7  # two siblings carry the same token


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """The longest path that the target agrees with, a stream, and the target's token after it."""

    path: Tensor  # [S, L+1] i32, rows, root first, padded with -1
    length: Tensor  # [S] i32, accepted draft tokens
    bonus: Tensor  # [S] i32, the target's token at the last row of the path; -1 where it has none
    status: Tensor  # [S] i32, an AcceptStatus


def accept(tree: DraftTree, target_tokens: Tensor, *, impl: str = "auto") -> Acceptance:
    """Walk from the root: while a child carries the target's token of the current row, move to that child.

    The walk is bounded by `depth_limit` and N whatever the tree holds. A stream with a malformed tree gets its status,
    a path of -1, length 0 and bonus -1; the others are as without it.

    Args:
        tree: S trees of N rows.
        target_tokens: [S, N] int, the target's token after each row; negative (a row that held NaN) matches nothing.
        impl: "reference" is this file's torch, on any device, "cuda" the kernel (`kdlab.kernels.tree_accept`), "auto"
            what `tree_accept_impl` says: the kernel for trees on a GPU up to its size.

    Returns:
        Acceptance on the tree's device.

    Raises:
        ShapeError: `tree` is none, or `target_tokens` has another shape or device, or is no integer tensor.
        ArgumentError: a target token is above 32 bits (checked on the CPU).
        NotSupported, UnsupportedDevice: "cuda" for a size or a device that the kernel does not run on.
    """
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    _check_target(tree, target_tokens)
    if impl == "auto":
        impl = tree_accept_impl(tree.capacity, tree.token.device)
    if impl == "cuda":
        arrays = (tree.token, tree.parent, tree.depth, tree.first_child, tree.next_sibling, tree.num_nodes)
        return Acceptance(**tree_accept(*arrays, target_tokens, tree.depth_limit)._asdict())
    wanted, status = target_tokens.long(), _status(tree)
    alive = good = status == AcceptStatus.OK
    row = torch.zeros(tree.num_streams, 1, dtype=torch.int64, device=wanted.device)
    path = torch.full((tree.num_streams, tree.depth_limit + 1), -1, dtype=torch.int32, device=wanted.device)
    path[:, 0] = torch.where(good, 0, -1)
    draft = _draft_rows(tree)
    for depth in range(1, min(tree.depth_limit + 1, tree.capacity)):
        hit = draft & (tree.parent == row) & (tree.token == wanted.gather(1, row))
        alive = alive & hit.any(dim=1)
        row = torch.where(alive, hit.int().argmax(dim=1), row[:, 0]).unsqueeze(1)
        path[:, depth] = torch.where(alive, row[:, 0], -1)
    bonus = torch.where(good, wanted.gather(1, row)[:, 0].clamp(min=-1), -1)
    length = (path[:, 1:] >= 0).sum(dim=1)
    return Acceptance(path=path, length=length.int(), bonus=bonus.int(), status=status)


def _check_target(tree: DraftTree, target_tokens: Tensor) -> None:
    if not isinstance(tree, DraftTree):
        raise ShapeError("tree", "a DraftTree", type(tree).__name__)
    check_shape("target_tokens", target_tokens, list(tree.token.shape))
    check_token_tensor("target_tokens", target_tokens)
    if target_tokens.device != tree.token.device:
        raise ShapeError("target_tokens", f"on {tree.token.device}", target_tokens.device)


def _draft_rows(tree: DraftTree) -> Tensor:
    """Return [S, N] bool: rows in use, the root left out."""
    rows = torch.arange(tree.capacity, device=tree.token.device)
    return (rows > 0) & (rows < tree.num_nodes.unsqueeze(1))


def _status(tree: DraftTree) -> Tensor:
    """Return [S] i32: the first fault of every stream in the order of AcceptStatus, without leaving the device."""
    draft = _draft_rows(tree)
    rows = torch.arange(tree.capacity, device=draft.device)
    size = tree.num_nodes.unsqueeze(1)
    parent = tree.parent.long()
    up = parent.clamp(0, tree.capacity - 1)
    depth_wrong = draft & ((tree.depth != tree.depth.gather(1, up) + 1) | (tree.depth > tree.depth_limit))
    faults = {
        AcceptStatus.BAD_SIZE: (size < 1) | (size > tree.capacity),
        AcceptStatus.BAD_PARENT: (draft & ((parent < 0) | (parent >= size))) | ((rows == 0) & (parent != -1)),
        AcceptStatus.BAD_ORDER: draft & (parent >= rows),
        AcceptStatus.BAD_DEPTH: depth_wrong | ((rows == 0) & (tree.depth != 0)),
        AcceptStatus.BAD_TOKEN: draft & (tree.token < 0),
        AcceptStatus.BAD_LINK: _wrong_links(tree, draft, up),
        AcceptStatus.DUPLICATE_CHILD: _equal_siblings(tree, draft),
    }
    status = torch.zeros(tree.num_streams, dtype=torch.int32, device=draft.device)
    for code in reversed(faults):
        status = torch.where(faults[code].any(dim=1), int(code), status)
    return status


def _wrong_links(tree: DraftTree, draft: Tensor, up: Tensor) -> Tensor:
    """Return [S, N] bool: links that leave the order or the family, and draft rows not linked exactly once."""
    rows = torch.arange(tree.capacity, device=draft.device)
    used = draft | (rows == 0)
    links_in = torch.zeros_like(up)
    wrong = torch.zeros_like(draft)
    for link, family in ((tree.first_child.long(), rows.expand_as(up)), (tree.next_sibling.long(), up)):
        linked = used & (link != -1)
        inside = linked & (link > rows) & (link < tree.num_nodes.unsqueeze(1))
        target = link.clamp(0, tree.capacity - 1)
        wrong |= linked & ~(inside & (up.gather(1, target) == family))
        links_in.scatter_add_(1, target, inside.long())
    return wrong | (draft & (links_in != 1)) | ((rows == 0) & (tree.next_sibling != -1))


def _equal_siblings(tree: DraftTree, draft: Tensor) -> Tensor:
    """Return [S, N-1] bool, by (parent, token) sorted: a neighbour is the same."""
    rows = torch.arange(tree.capacity, device=draft.device)
    keys = torch.where(draft, (tree.parent.long() << 32) + tree.token.long(), -1 - rows)
    ordered = keys.sort(dim=1).values
    return ordered[:, 1:] == ordered[:, :-1]
