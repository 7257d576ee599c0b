"""DraftTree: a batch of draft token trees as a struct of arrays, on the CPU or a GPU."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kdlab.checks import check_int, check_shape, check_token_tensor
from kdlab.errors import ShapeError
from kdlab.kernels.ancestors import num_words, unpack_ancestors
from kdlab.tree.pack import pack_nodes
from kdlab.tree.reading import parents_from_edges, read_parents


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """S draft trees of at most N rows each; `check_tree` enforces what the fields promise.

    Row 0 is the root, parents stand before their children, siblings are linked in row order. Rows from `num_nodes`
    on are unused: token, parent and links -1, depth and ancestors 0.
    """

    token: Tensor  # [S, N] i32; the root's is 0 until with_root
    parent: Tensor  # [S, N] i32; root -1
    depth: Tensor  # [S, N] i32; root 0
    logp: Tensor  # [S, N] f32, nats, summed along the path; root 0
    rank: Tensor  # [S, N] i32; place among the draft's candidates of its depth, best 0; root 0
    num_nodes: Tensor  # [S] i32, root included
    ancestors: Tensor  # [S, N, ceil(N/32)] uint32 bitset, itself included
    first_child: Tensor  # [S, N] i32; -1 none
    next_sibling: Tensor  # [S, N] i32; -1 none
    missed_mass: Tensor  # [S, L] f32; draft probability outside the candidates of a depth
    truncated: Tensor  # [S] bool; more candidates could have changed the tree
    nonfinite_rows: Tensor  # [S] i32; draft rows with NaN, +inf or nothing finite
    depth_limit: int  # L, draft positions

    @property
    def num_streams(self) -> int:
        """Number of trees S."""
        return self.token.shape[0]

    @property
    def capacity(self) -> int:
        """Rows a tree N, root and unused rows included."""
        return self.token.shape[1]

    def ancestor_mask(self) -> Tensor:
        """Return [S, N, N] bool: row i may see row j, which is i itself or one of its ancestors."""
        return unpack_ancestors(self.ancestors)

    def with_root(self, anchor: Tensor) -> "DraftTree":
        """Return the tree with `anchor` ([S] int) as the token of each root."""
        check_shape("anchor", anchor, [self.num_streams])
        check_token_tensor("anchor", anchor, minimum=0)
        token = self.token.clone()
        token[:, 0] = anchor
        return replace(self, token=token)

    def stream(self, index: int) -> "DraftTree":
        """Return one stream's tree (S = 1), trimmed to exactly its nodes."""
        index = check_int("index", index, minimum=0, maximum=self.num_streams - 1)
        one = {name: value[index : index + 1] for name, value in self._tensors().items()}
        return replace(self, **one)._first_rows(int(self.num_nodes[index]))

    def prefix(self, budget: int) -> "DraftTree":
        """Return the tree of the first `budget` nodes: for a best-first tree, the best tree of that budget.

        `truncated` stays as the larger tree had it, because the number of candidates is not kept.
        """
        return self._first_rows(check_int("budget", budget, minimum=0, maximum=self.capacity - 1) + 1)

    def to(self, device: torch.device | str) -> "DraftTree":
        """Return the tree with its arrays on `device`."""
        return replace(self, **{name: value.to(device) for name, value in self._tensors().items()})

    @classmethod
    def from_parents(
        cls,
        token: Tensor | Sequence,
        parent: Tensor | Sequence,
        logp: Tensor | Sequence | None = None,
        rank: Tensor | Sequence | None = None,
    ) -> "DraftTree":
        """Return the trees that a token and a parent a row describe; `depth_limit` is the depth of the deepest node.

        Args:
            token: [N] or [S, N] int; row 0 is the root. Rows with token and parent -1 at a stream's end are unused.
            parent: like `token`; -1 for the root, else a row before the node.
            logp: like `token`, float, nats summed along the path, root 0; zeros when None.
            rank: like `token`, int, root 0; each node's place among its siblings when None.

        Raises:
            ShapeError: shapes or dtypes do not fit, or there are more than MAX_BUDGET + 1 rows.
            TreeError: a cycle, several roots or none, an out-of-range or later parent, equal tokens of siblings,
                or scores that grow along a path; the message names the stream and the node.
        """
        streams, capacity, device = read_parents(token, parent, logp, rank)
        arrays = pack_nodes(streams, capacity, device)
        return assemble(arrays, depth_limit=int(arrays["depth"].max()) if streams else 0)

    @classmethod
    def from_edges(
        cls,
        token: Sequence[int],
        edges: Iterable[tuple[int, int]],
        logp: Sequence[float] | None = None,
        rank: Sequence[int] | None = None,
    ) -> "DraftTree":
        """Return the one tree that `token` ([N], root first) and (parent, child) pairs describe.

        Raises:
            TreeError: as `from_parents`, and for a node with two parents or linked twice.
        """
        if not hasattr(token, "__len__"):
            raise ShapeError("token", "a list of token ids", repr(token))
        return cls.from_parents(token, parents_from_edges(len(token), edges), logp, rank)

    def _tensors(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "depth_limit"}

    def _first_rows(self, rows: int) -> "DraftTree":
        # Copies, not views: a record must outlive the buffers that the next round writes.
        names = ("token", "parent", "depth", "logp", "rank", "first_child", "next_sibling")
        copies = {name: value.clone() for name, value in self._tensors().items() if name not in (*names, "ancestors")}
        copies |= {name: getattr(self, name)[:, :rows].clone(memory_format=torch.contiguous_format) for name in names}
        for name in ("first_child", "next_sibling"):
            copies[name][copies[name] >= rows] = -1
        words = self.ancestors.view(torch.int32)[:, :rows, : num_words(rows)]
        copies["ancestors"] = words.clone(memory_format=torch.contiguous_format).view(torch.uint32)
        copies["num_nodes"].clamp_(max=rows)
        return replace(self, **copies)


def assemble(
    arrays: dict[str, Tensor],
    *,
    depth_limit: int,
    missed_mass: Tensor | None = None,
    truncated: Tensor | None = None,
    nonfinite_rows: Tensor | None = None,
) -> DraftTree:
    """Return a DraftTree from `pack_nodes`' arrays; what is not given is zero: nothing missed, truncated or broken."""
    streams, device = arrays["token"].shape[0], arrays["token"].device
    if missed_mass is None:
        missed_mass = torch.zeros(streams, depth_limit, device=device)
    if truncated is None:
        truncated = torch.zeros(streams, dtype=torch.bool, device=device)
    if nonfinite_rows is None:
        nonfinite_rows = torch.zeros(streams, dtype=torch.int32, device=device)
    return DraftTree(
        **arrays,
        missed_mass=missed_mass.to(device),
        truncated=truncated.to(device),
        nonfinite_rows=nonfinite_rows.to(device),
        depth_limit=depth_limit,
    )
