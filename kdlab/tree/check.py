"""check_tree: every promise of DraftTree, tested one stream after the other."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import check_int, check_shape
from kdlab.errors import TreeError
from kdlab.kernels.ancestors import ancestor_words, child_links, depths_of, num_words
from kdlab.tree.draft_tree import DraftTree
from kdlab.tree.invariants import check_parents, check_ranks, check_scores, check_tokens, fault

ROW_FIELDS = {
    "token": torch.int32,
    "parent": torch.int32,
    "depth": torch.int32,
    "logp": torch.float32,
    "rank": torch.int32,
    "first_child": torch.int32,
    "next_sibling": torch.int32,
}
UNUSED = {"token": -1, "parent": -1, "depth": 0, "first_child": -1, "next_sibling": -1}


def check_tree(tree: DraftTree) -> None:
    """Raise TreeError unless `tree` keeps every promise of DraftTree; linear in its rows, no recursion.

    Args:
        tree: S trees of N rows, on any device; the arrays are copied to the CPU.

    Raises:
        TreeError: names the stream and the node, or the array whose shape or dtype is wrong.
    """
    _check_arrays(tree)
    arrays = {name: getattr(tree, name).cpu().numpy() for name in (*ROW_FIELDS, "ancestors")}
    for stream, used in enumerate(tree.num_nodes.tolist()):
        if not 1 <= used <= tree.capacity:
            raise TreeError(f"stream {stream}: num_nodes {used}, expected 1 to {tree.capacity}")
        rows = {name: array[stream] for name, array in arrays.items()}
        _check_used(rows, used, tree.depth_limit, stream)
        _check_unused(rows, used, stream)


def _check_arrays(tree: DraftTree) -> None:
    if not isinstance(tree, DraftTree):
        raise TreeError(f"tree: expected a DraftTree, got {type(tree).__name__}")
    check_int("depth_limit", tree.depth_limit, minimum=0)
    check_shape("token", tree.token, ["S", "N"])
    streams, rows = tree.token.shape
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: ((streams, rows), dtype) for name, dtype in ROW_FIELDS.items()
    }
    expected |= {
        "num_nodes": ((streams,), torch.int32),
        "ancestors": ((streams, rows, num_words(rows)), torch.uint32),
        "missed_mass": ((streams, tree.depth_limit), torch.float32),
        "truncated": ((streams,), torch.bool),
        "nonfinite_rows": ((streams,), torch.int32),
    }
    for name, (shape, dtype) in expected.items():
        array = getattr(tree, name)
        got = f"{list(array.shape)} {array.dtype}" if isinstance(array, Tensor) else type(array).__name__
        if got != f"{list(shape)} {dtype}":
            raise TreeError(f"{name}: expected {list(shape)} {dtype}, got {got}")


def _check_used(rows: dict[str, np.ndarray], used: int, depth_limit: int, stream: int) -> None:
    column = {name: rows[name][:used].tolist() for name in ROW_FIELDS}
    parent = column["parent"]
    check_parents(parent, stream)
    check_tokens(column["token"], parent, stream)
    depth = depths_of(parent)
    _check_equal("depth", column["depth"], depth, stream)
    if max(depth) > depth_limit:
        raise fault(stream, depth.index(max(depth)), f"depth {max(depth)} is above the depth limit {depth_limit}")
    check_scores(column["logp"], parent, stream)
    check_ranks(column["rank"], stream)
    _check_links(column["first_child"], column["next_sibling"], parent, stream)
    wrong = (rows["ancestors"][:used] != ancestor_words(parent, rows["ancestors"].shape[1])).any(axis=1)
    if wrong.any():
        raise fault(stream, int(wrong.argmax()), "its ancestor bits are not its parent's bits and its own")


def _check_equal(name: str, got: Sequence[int], expected: Sequence[int], stream: int) -> None:
    for node, (value, wanted) in enumerate(zip(got, expected, strict=True)):
        if value != wanted:
            raise fault(stream, node, f"{name} {value}, expected {wanted}")


def _check_links(first_child: list[int], next_sibling: list[int], parent: list[int], stream: int) -> None:
    linked_from: dict[int, int] = {}
    for name, links in (("first_child", first_child), ("next_sibling", next_sibling)):
        for node, other in enumerate(links):
            if other != -1 and not 0 <= other < len(parent):
                raise fault(stream, node, f"{name} {other} is out of range, the tree has rows 0..{len(parent) - 1}")
            if other != -1 and linked_from.setdefault(other, node) != node:
                raise fault(stream, other, f"is linked twice, from nodes {linked_from[other]} and {node}")
    expected_child, expected_sibling = child_links(parent)
    _check_equal("first_child", first_child, expected_child, stream)
    _check_equal("next_sibling", next_sibling, expected_sibling, stream)


def _check_unused(rows: dict[str, np.ndarray], used: int, stream: int) -> None:
    for name, empty in UNUSED.items():
        wrong = rows[name][used:] != empty
        if wrong.any():
            node = used + int(wrong.argmax())
            raise fault(stream, node, f"is unused, so its {name} must be {empty}, not {rows[name][node]}")
    wrong = rows["ancestors"][used:].any(axis=1)
    if wrong.any():
        raise fault(stream, used + int(wrong.argmax()), "is unused, so its ancestor bits must be 0")
