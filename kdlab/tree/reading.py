"""Reading trees that were made elsewhere: from arrays or edges to checked lists of nodes."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kdlab.checks import check_int, check_integer_tensor, check_shape
from kdlab.errors import ArgumentError, ShapeError
from kdlab.tree.invariants import check_parents, check_ranks, check_scores, check_tokens, fault
from kdlab.tree.pack import MAX_BUDGET, Nodes

Array = Tensor | Sequence


def read_parents(
    token: Array, parent: Array, logp: Array | None, rank: Array | None
) -> tuple[list[Nodes], int, torch.device]:
    """Return the nodes of every stream, the rows a stream and the device; see `DraftTree.from_parents`."""
    tokens = _as_batch("token", token, integer=True)
    shape = tokens.shape
    parents = _as_batch("parent", parent, integer=True, shape=shape).tolist()
    logps = None if logp is None else _as_batch("logp", logp, integer=False, shape=shape).tolist()
    ranks = None if rank is None else _as_batch("rank", rank, integer=True, shape=shape).tolist()
    streams = []
    for stream, row_tokens in enumerate(tokens.tolist()):
        used = _num_used(row_tokens, parents[stream])
        links = parents[stream][:used]
        check_parents(links, stream)
        check_tokens(row_tokens[:used], links, stream)
        scores = [0.0] * used if logps is None else logps[stream][:used]
        check_scores(scores, links, stream)
        places = _sibling_places(links) if ranks is None else ranks[stream][:used]
        check_ranks(places, stream)
        streams.append(Nodes(row_tokens[:used], links, scores, places))
    return streams, shape[1], tokens.device


def _as_batch(name: str, value: Array, *, integer: bool, shape: torch.Size | None = None) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ShapeError(name, "numbers as [N] or [S, N]", f"{type(value).__name__} ({error})") from error
    if tensor.dim() == 1:
        tensor = tensor.unsqueeze(0)
    if shape is not None:
        check_shape(name, tensor, list(shape))
    elif tensor.dim() != 2 or not 1 <= tensor.shape[1] <= MAX_BUDGET + 1:
        expected = f"[N] or [S, N] with N from 1 (the root) to {MAX_BUDGET + 1}"
        raise ShapeError(name, expected, list(tensor.shape))
    if integer:
        check_integer_tensor(name, tensor)
        return tensor
    if tensor.is_complex():
        raise ShapeError(name, "real numbers", tensor.dtype)
    return tensor.float()


def _num_used(token: list[int], parent: list[int]) -> int:
    used = len(token)
    while used > 1 and token[used - 1] == -1 and parent[used - 1] == -1:
        used -= 1
    return used


def _sibling_places(parent: list[int]) -> list[int]:
    children, places = [0] * len(parent), [0] * len(parent)
    for node in range(1, len(parent)):
        places[node] = children[parent[node]]
        children[parent[node]] += 1
    return places


def parents_from_edges(num_nodes: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the parent of every node from (parent, child) pairs, -1 for nodes that no pair names as child.

    Raises:
        TreeError: a pair names a node that does not exist, or a node gets two parents.
        ArgumentError: `edges` are no pairs of integers.
    """
    parent, last = [-1] * num_nodes, num_nodes - 1
    for up, node in _pairs(edges):
        for end in (node, up):
            if not 0 <= end <= last:
                raise fault(0, end, f"edge ({up}, {node}) is out of range, the tree has rows 0..{last}")
        if parent[node] == up:
            raise fault(0, node, f"is linked twice to its parent {up}")
        if parent[node] != -1:
            raise fault(0, node, f"has two parents, {parent[node]} and {up}")
        parent[node] = up
    return parent


def _pairs(edges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    try:
        pairs = [tuple(edge) for edge in edges]
    except TypeError as error:
        raise ArgumentError("edges", "pairs (parent, child)", repr(edges)) from error
    for index, pair in enumerate(pairs):
        if len(pair) != 2:
            raise ArgumentError(f"edges[{index}]", "a pair (parent, child)", pair)
    return [(check_int("edges", up), check_int("edges", node)) for up, node in pairs]
