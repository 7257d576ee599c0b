"""The best-first builder: DDTree's optimal tree of a node budget (Ringel and Romano, arXiv 2604.12989, algorithm 1)."""

from heapq import heappop, heappush

from torch import Tensor

from kdlab.checks import check_choice, check_int, check_shape
from kdlab.kernels.tree_build import tree_build, tree_build_fits
from kdlab.tree.candidates import read_candidates
from kdlab.tree.draft_tree import DraftTree
from kdlab.tree.pack import MAX_BUDGET, Nodes


def build_best_first(
    log_probs: Tensor, token_ids: Tensor, budget: int, *, vocab_size: int | None = None, impl: str = "auto"
) -> DraftTree:
    """Grow, in every stream, the `budget` most probable nodes that the candidates offer.

    A node's score is its parent's score plus its log-probability, in float64 from the root. Rows are in pop order:
    score descending, equal scores by the lexicographically smaller tuple of ranks, so the first n + 1 rows are the best
    tree of budget n. Candidates of -inf never become nodes; a row with NaN, +inf or nothing finite ends the tree above.

    Args:
        log_probs: [S, L, K] float, nats: the draft's candidates at each of L positions, independent of each other.
        token_ids: [S, L, K] int, distinct within a row.
        budget: nodes without the root, 0 to MAX_BUDGET; fewer come out where fewer exist.
        vocab_size: vocabulary of the drafter; without it a tree may be marked truncated although K holds all of it.
        impl: "reference" is this file's heap on the CPU, "cuda" the kernel (`kdlab.kernels.tree_build`), "auto" the
            kernel for candidates on a GPU up to its size. The kernel cannot raise for a malformed candidate: its row
            counts as broken.

    Returns:
        A DraftTree of capacity budget + 1 on the device of `log_probs`. `truncated` says that K is less than the budget
        and less than the vocabulary, so a wider candidate list could hold better nodes.

    Raises:
        ArgumentError: `budget` is out of range or no integer, or a candidate is malformed.
        NotSupported, UnsupportedDevice: "cuda" for a size or a device that the kernel does not run on.
    """
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    budget = check_int("budget", budget, minimum=0, maximum=MAX_BUDGET)
    check_shape("log_probs", log_probs, ["S", "L", "K"])
    if impl == "cuda" or (impl == "auto" and log_probs.is_cuda and tree_build_fits(log_probs, budget)):
        arrays = tree_build(log_probs, token_ids, budget, vocab_size=vocab_size)
        return DraftTree(**arrays._asdict(), depth_limit=log_probs.shape[1])
    candidates = read_candidates(log_probs, token_ids, vocab_size)
    streams = [grow(*candidates.rows(stream, budget), budget) for stream in range(log_probs.shape[0])]
    return candidates.to_tree(streams, capacity=budget + 1, width=budget)


def grow(log_probs: list[list[float]], token_ids: list[list[int]], budget: int) -> Nodes:
    """Pop the best node, offer its next sibling and its first child, until the budget is spent: one stream's tree.

    Every rank tuple is offered once, by a node that precedes it in the order, so the heap always holds the next best.
    """
    nodes = Nodes.root()
    heap: list[tuple[float, tuple[int, ...], int, float]] = []  # -score, ranks, parent's row, parent's score
    if log_probs and budget:
        heap.append((-log_probs[0][0], (0,), 0, 0.0))
    while heap and len(nodes.token) <= budget:
        negative, ranks, parent, parent_score = heappop(heap)
        depth, rank, score = len(ranks), ranks[-1], -negative
        row = nodes.add(token_ids[depth - 1][rank], parent, score, rank)
        siblings = log_probs[depth - 1]
        if rank + 1 < len(siblings):
            heappush(heap, (-(parent_score + siblings[rank + 1]), (*ranks[:-1], rank + 1), parent, parent_score))
        if depth < len(log_probs):
            heappush(heap, (-(score + log_probs[depth][0]), (*ranks, 0), row, score))
    return nodes
