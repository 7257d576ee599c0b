"""Reading trees that were made elsewhere: from token and parent arrays to checked lists of nodes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kdlab.checks import MAX_TOKEN, check_integer_tensor, check_shape
from kdlab.errors import ShapeError
from kdlab.tree.pack import MAX_BUDGET, Nodes
from kdlab.tree.parents import check_parents, check_tokens, fault

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


def check_scores(logp: Sequence[float], parent: Sequence[int], stream: int = 0) -> None:
    """Raise TreeError unless the root's score is 0 and no score is above its parent's or NaN."""
    if logp[0] != 0:
        raise fault(stream, 0, f"logp of the root must be 0, not {logp[0]}")
    for node in range(1, len(parent)):
        if not logp[node] <= logp[parent[node]]:
            above = f"that of its parent {parent[node]}, {logp[parent[node]]}"
            raise fault(stream, node, f"logp {logp[node]} is above {above}, or not a number")


def check_ranks(rank: Sequence[int], stream: int = 0) -> None:
    """Raise TreeError unless the root's rank is 0 and every other one a 32-bit number of at least 0."""
    for node, value in enumerate(rank):
        if not 0 <= value <= (0 if node == 0 else MAX_TOKEN):
            raise fault(stream, node, f"rank {value}, expected {'0' if node == 0 else f'0 to {MAX_TOKEN}'}")
