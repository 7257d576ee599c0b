"""What follows from a list of parents that stand before their children: depths, child links, ancestor bitsets."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

WORD_BITS = 32


def num_words(num_rows: int) -> int:
    """Return how many 32-bit words hold one bit a row."""
    return -(-num_rows // WORD_BITS)


def depths_of(parent: Sequence[int]) -> list[int]:
    """Return the depth of every node, 0 for the root, from its parent (-1 for the root)."""
    depth = [0] * len(parent)
    for node in range(1, len(parent)):
        depth[node] = depth[parent[node]] + 1
    return depth


def child_links(parent: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return each node's first child and next sibling, -1 for none; siblings are linked in row order."""
    first_child, next_sibling = [-1] * len(parent), [-1] * len(parent)
    for node in range(len(parent) - 1, 0, -1):
        next_sibling[node] = first_child[parent[node]]
        first_child[parent[node]] = node
    return first_child, next_sibling


def ancestor_words(parent: Sequence[int], words: int) -> np.ndarray:
    """Return every node's ancestors, itself included, as a bitset.

    Args:
        parent: one entry a node, -1 for the root.
        words: 32-bit words a node.

    Returns:
        [n, words] uint32; bit j % 32 of word j // 32 is set when node j is on the path from the root.
    """
    bits = [1] * len(parent)
    for node in range(1, len(parent)):
        bits[node] = bits[parent[node]] | (1 << node)
    packed = b"".join(value.to_bytes(words * WORD_BITS // 8, "little") for value in bits)
    return np.frombuffer(packed, dtype="<u4").reshape(len(parent), words)


def unpack_ancestors(ancestors: Tensor) -> Tensor:
    """Return the bitsets as one bool a pair of rows.

    Args:
        ancestors: [S, N, ceil(N/32)] uint32.

    Returns:
        [S, N, N] bool; row i may see row j.
    """
    streams, rows, words = ancestors.shape
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=ancestors.device)
    # torch shifts no uint32; the sign bit that an int32 shift drags along is masked off.
    bits = (ancestors.view(torch.int32).unsqueeze(-1) >> shifts) & 1
    return bits.reshape(streams, rows, words * WORD_BITS)[..., :rows].bool()
