"""From lists of nodes, one a stream, to the padded arrays of a DraftTree."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kdlab.kernels.ancestors import ancestor_words, child_links, depths_of, num_words

# A tree of this budget has 33 MB of ancestor bits, which grow with the square.
MAX_BUDGET = 1 << 14


class Nodes(NamedTuple):
    """One tree as lists, the root first and parents before their children."""

    token: list[int]
    parent: list[int]
    logp: list[float]
    rank: list[int]

    @classmethod
    def root(cls) -> "Nodes":
        """Return a tree of the root alone, to be grown with `add`."""
        return cls([0], [-1], [0.0], [0])

    def add(self, token: int, parent: int, logp: float, rank: int) -> int:
        """Append a node and return its row."""
        self.token.append(token)
        self.parent.append(parent)
        self.logp.append(logp)
        self.rank.append(rank)
        return len(self.token) - 1


def pack_nodes(streams: Sequence[Nodes], capacity: int, device: torch.device) -> dict[str, Tensor]:
    """Return a DraftTree's per-row fields and `num_nodes`, padded to `capacity` rows.

    Args:
        streams: one tree a stream, each of at most `capacity` nodes.
        capacity: rows N of every stream.
        device: where the arrays go.

    Returns:
        token, parent, depth, logp, rank, num_nodes, ancestors, first_child, next_sibling as DraftTree documents them.
    """
    shape, words = (len(streams), capacity), num_words(capacity)
    empty = {"token": -1, "parent": -1, "depth": 0, "rank": 0, "first_child": -1, "next_sibling": -1}
    arrays = {name: np.full(shape, value, dtype=np.int32) for name, value in empty.items()}
    arrays["logp"] = np.zeros(shape, dtype=np.float32)
    arrays["ancestors"] = np.zeros((*shape, words), dtype=np.uint32)
    arrays["num_nodes"] = np.array([len(nodes.token) for nodes in streams], dtype=np.int32)
    for stream, nodes in enumerate(streams):
        first_child, next_sibling = child_links(nodes.parent)
        columns = nodes._asdict() | {
            "depth": depths_of(nodes.parent),
            "first_child": first_child,
            "next_sibling": next_sibling,
            "ancestors": ancestor_words(nodes.parent, words),
        }
        for name, column in columns.items():
            arrays[name][stream, : len(nodes.token)] = column
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
