"""What every tree keeps, checked on lists: parents, tokens, scores and ranks of the nodes of one stream.

Each error names the stream and the node. Linear time, no recursion.
"""

from collections.abc import Sequence

from kdlab.checks import MAX_TOKEN
from kdlab.errors import TreeError


def fault(stream: int, node: int, what: str) -> TreeError:
    """Return the error that names a stream and a node."""
    return TreeError(f"stream {stream}, node {node}: {what}")


def check_parents(parent: Sequence[int], stream: int = 0) -> None:
    """Raise TreeError unless row 0 is the only root, every parent exists and stands before its child.

    Args:
        parent: one entry a node, -1 for the root.
        stream: named in the error.

    Raises:
        TreeError: out-of-range parent, no root, several roots, a cycle, or a parent after its child.
    """
    last = len(parent) - 1
    for node, up in enumerate(parent):
        if not -1 <= up <= last:
            raise fault(stream, node, f"parent {up} is out of range, the tree has rows 0..{last}")
    _check_root(parent, stream)
    cycle = _find_cycle(parent)
    if cycle:
        shown = " -> ".join(map(str, cycle[:8])) + (" -> ..." if len(cycle) > 8 else f" -> {cycle[0]}")
        raise fault(stream, cycle[0], f"lies on a cycle of {len(cycle)} parent links: {shown}")
    for node, up in enumerate(parent):
        if up >= node:
            raise fault(stream, node, f"its parent {up} comes after it; parents must stand before their children")


def _check_root(parent: Sequence[int], stream: int) -> None:
    roots = [node for node, up in enumerate(parent) if up == -1]
    if not roots:
        found = f"its parent is {parent[0]}" if parent else "the tree has no rows"
        raise fault(stream, 0, f"no root: row 0 must have parent -1, but {found} and the links only form a cycle")
    if roots[0] != 0:
        raise fault(stream, roots[0], f"is a root (parent -1), but the root must be row 0, whose parent is {parent[0]}")
    if len(roots) > 1:
        raise fault(stream, roots[1], f"is a second root (parent -1), one of {len(roots)} roots")


def _find_cycle(parent: Sequence[int]) -> list[int]:
    """Return the nodes of one cycle of parent links, or an empty list."""
    walk_of = [0] * len(parent)
    for walk in range(1, len(parent) + 1):
        node = walk - 1
        while node != -1 and not walk_of[node]:
            walk_of[node] = walk
            node = parent[node]
        if node != -1 and walk_of[node] == walk:
            cycle = [node]
            while parent[cycle[-1]] != node:
                cycle.append(parent[cycle[-1]])
            return cycle
    return []


def check_tokens(token: Sequence[int], parent: Sequence[int], stream: int = 0) -> None:
    """Raise TreeError unless every token is a 32-bit id of at least 0 and no two siblings share one."""
    seen: dict[tuple[int, int], int] = {}
    for node, (value, up) in enumerate(zip(token, parent, strict=True)):
        if not 0 <= value <= MAX_TOKEN:
            raise fault(stream, node, f"token {value} is not an id from 0 to {MAX_TOKEN}")
        twin = seen.setdefault((up, value), node)
        if twin != node:
            raise fault(stream, node, f"token {value} repeats that of its sibling, node {twin} (parent {up})")


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
