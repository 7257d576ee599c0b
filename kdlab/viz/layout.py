"""Where the nodes of a token tree stand: depth to the right, likeliest child straight on, siblings on lines below."""

from collections.abc import Sequence


def tidy_lines(parents: Sequence[int], order: Sequence[float]) -> list[int]:
    """Give every node a line so that a first child shares its parent's and no two branches cross.

    The most likely continuation then reads straight on, and each alternative starts a line of its own below it.

    Args:
        parents: [N] parent row of each row; -1 for the root, which is row 0; parents come before children.
        order: [N] sort key among siblings, the smallest first (equal keys stay in row order).

    Returns:
        [N] line of each row: the root's is 0, and lines 0..max are all in use.
    """
    children: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(row)
    lines = [0] * len(parents)
    next_line = 1
    waiting = [(0, True)]  # (row, takes its parent's line); an explicit stack, so that deep chains need no recursion
    while waiting:
        row, goes_on = waiting.pop()
        if goes_on:
            lines[row] = lines[parents[row]] if row else 0
        else:
            lines[row] = next_line
            next_line += 1
        family = sorted(children[row], key=lambda child: order[child])
        waiting.extend((child, child == family[0]) for child in reversed(family))
    return lines
