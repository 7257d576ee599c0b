"""The other shapes of draft tree: the root alone (AR), the chain (DFlash) and the beam."""

from heapq import heappop, heappush

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_int, check_shape
from kdlab.kernels.tree_build import tree_build, tree_build_fits
from kdlab.tree.candidates import read_candidates
from kdlab.tree.draft_tree import DraftTree, assemble
from kdlab.tree.pack import MAX_BUDGET, Nodes, pack_nodes

Scored = tuple[float, tuple[int, ...]]  # -score and the ranks on the path: sorts in the builders' common order


def build_root_only(num_streams: int, device: torch.device | str = "cpu") -> DraftTree:
    """Return `num_streams` trees of the root alone: plain one-token decoding (AR)."""
    num_streams = check_int("num_streams", num_streams, minimum=0)
    return assemble(pack_nodes([Nodes.root() for _ in range(num_streams)], 1, torch.device(device)), depth_limit=0)


def build_chain(
    log_probs: Tensor, token_ids: Tensor, length: int, *, vocab_size: int | None = None, impl: str = "auto"
) -> DraftTree:
    """Return, a stream, the one path of the best candidate at every depth.

    Args:
        log_probs: [S, L, K] float, nats, as `build_best_first` takes them.
        token_ids: [S, L, K] int.
        length: nodes without the root, 0 to MAX_BUDGET; at most L and at most the usable depths come out.
        vocab_size: checked against the ids only, a chain is never truncated.
        impl: as for `build_best_first`.

    Returns:
        A DraftTree of capacity length + 1.

    Raises:
        ArgumentError: `length` is out of range or no integer, or a candidate is malformed.
        NotSupported, UnsupportedDevice: "cuda" for a size or a device that the kernel does not run on.
    """
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    length = check_int("length", length, minimum=0, maximum=MAX_BUDGET)
    check_shape("log_probs", log_probs, ["S", "L", "K"])
    if impl == "cuda" or (impl == "auto" and log_probs.is_cuda and tree_build_fits(log_probs, length)):
        return _chain_by_kernel(log_probs, token_ids, length, vocab_size)
    candidates = read_candidates(log_probs, token_ids, vocab_size)
    streams = []
    for stream in range(log_probs.shape[0]):
        nodes = Nodes.root()
        scores, tokens = candidates.rows(stream, 1)
        for depth in range(min(length, len(scores))):
            nodes.add(tokens[depth][0], depth, nodes.logp[-1] + scores[depth][0], 0)
        streams.append(nodes)
    return candidates.to_tree(streams, capacity=length + 1, width=0)


def _chain_by_kernel(log_probs: Tensor, token_ids: Tensor, length: int, vocab_size: int | None) -> DraftTree:
    """Let the kernel of the best-first tree build chains: with one candidate a depth its tree is the chain."""
    best = log_probs.amax(dim=-1, keepdim=True)  # NaN where the row holds any
    token = token_ids.gather(-1, (log_probs == best).int().argmax(dim=-1, keepdim=True))
    tree = tree_build(best, token, length, vocab_size=vocab_size)
    if log_probs.shape[-1] > 1:  # the mass outside one candidate is not that outside K
        tree = tree._replace(missed_mass=tree_build(log_probs, token_ids, 0, vocab_size=vocab_size).missed_mass)
    tree = tree._replace(truncated=torch.zeros_like(tree.truncated))
    return DraftTree(**tree._asdict(), depth_limit=log_probs.shape[1])


def build_beam(
    log_probs: Tensor, token_ids: Tensor, width: int, budget: int | None = None, *, vocab_size: int | None = None
) -> DraftTree:
    """Keep, at every depth, the `width` best children of the depth before, then the `budget` best nodes of all.

    The order is that of `build_best_first` at each choice and in the rows, so with `width` >= `budget` the trees are
    the same: no depth of the best tree holds more than `budget` nodes.

    Args:
        log_probs: [S, L, K] float, nats, as `build_best_first` takes them.
        token_ids: [S, L, K] int.
        width: nodes kept a depth.
        budget: nodes without the root, 0 to MAX_BUDGET; None keeps all, width x L at most.
        vocab_size: as for `build_best_first`.

    Returns:
        A DraftTree of capacity budget + 1, truncated where K is less than both `width` and the vocabulary.

    Raises:
        ArgumentError: `width` or `budget` is out of range or no integer, or a candidate is malformed.
    """
    width = check_int("width", width, minimum=1)
    candidates = read_candidates(log_probs, token_ids, vocab_size)
    budget = width * log_probs.shape[1] if budget is None else budget
    budget = check_int("budget", budget, minimum=0, maximum=MAX_BUDGET)
    # A node behind `budget` others of its depth is none of the best, and neither is anything below it.
    width = max(1, min(width, budget))
    streams = []
    for stream in range(log_probs.shape[0]):
        scores, tokens = candidates.rows(stream, width)
        streams.append(_place(_kept(scores, width), tokens, budget))
    return candidates.to_tree(streams, capacity=budget + 1, width=min(width, budget))


def _kept(log_probs: list[list[float]], width: int) -> list[Scored]:
    """Return the beams of all depths."""
    kept: list[Scored] = []
    beam: list[Scored] = [(0.0, ())]
    for row in log_probs:
        beam = _best_children(beam, row, width)
        kept.extend(beam)
    return kept


def _best_children(beam: list[Scored], row: list[float], width: int) -> list[Scored]:
    """Return the best children of a beam in order: a merge, because each parent's children are sorted already."""
    heap = [(negative - row[0], (*ranks, 0), negative) for negative, ranks in beam]
    heap.sort()
    best: list[Scored] = []
    while heap and len(best) < width:
        negative, ranks, parent = heappop(heap)
        best.append((negative, ranks))
        rank = ranks[-1] + 1
        if rank < len(row):
            heappush(heap, (parent - row[rank], (*ranks[:-1], rank), parent))
    return best


def _place(kept: list[Scored], token_ids: list[list[int]], budget: int) -> Nodes:
    """Return the best `budget` nodes as rows; a parent never sorts behind its child, so none is missing."""
    nodes = Nodes.root()
    row_of: dict[tuple[int, ...], int] = {(): 0}
    for negative, ranks in sorted(kept)[:budget]:
        token = token_ids[len(ranks) - 1][ranks[-1]]
        row_of[ranks] = nodes.add(token, row_of[ranks[:-1]], -negative, ranks[-1])
    return nodes
