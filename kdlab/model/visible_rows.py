"""Which of a forward's own rows each row sees, besides the prefix: a draft tree's ancestors or a causal chunk."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kdlab.kernels.ancestors import WORD_BITS, num_words, unpack_ancestors


@dataclass(frozen=True, slots=True, eq=False)
class VisibleRows:
    """The mask of N rows a stream as the CUDA ops read it."""

    ancestors: Tensor  # [S, N, ceil(N/32)] uint32, row i sees row j where bit j is set; j <= i, i itself included
    num_rows: Tensor  # [S] i32, rows in use, the first ones; 0 for a stream that rests

    @classmethod
    def from_mask(cls, mask: Tensor) -> "VisibleRows":
        """Pack a mask [S, N, N] bool, a lower triangle at most; a row that sees nothing is not in use."""
        rows = mask.shape[-1]
        padding = num_words(rows) * WORD_BITS - rows
        bits = torch.nn.functional.pad(mask, (0, padding)).unflatten(-1, (-1, WORD_BITS)).long()
        words = (bits << torch.arange(WORD_BITS, device=mask.device)).sum(-1)
        return cls(_signed(words).view(torch.uint32), mask.any(-1).sum(-1, dtype=torch.int32))

    @classmethod
    def causal(cls, num_rows: Tensor, capacity: int) -> "VisibleRows":
        """Return the rows of a chunk: each sees those before it and itself.

        Args:
            num_rows: [S] i32, rows in use.
            capacity: N.
        """
        row = torch.arange(capacity, device=num_rows.device)
        first = WORD_BITS * torch.arange(num_words(capacity), device=num_rows.device)
        bits = (row[:, None] + 1 - first).clamp(0, WORD_BITS)  # of each word, the lowest ones
        words = _signed((1 << bits) - 1)
        return cls(words.view(torch.uint32).expand(len(num_rows), -1, -1).contiguous(), num_rows)

    def used(self) -> Tensor:
        """Return [S, N] bool, the rows in use."""
        return torch.arange(self.ancestors.shape[1], device=self.num_rows.device) < self.num_rows[:, None]

    def mask(self) -> Tensor:
        """Return [S, N, N] bool: row i sees row j."""
        return unpack_ancestors(self.ancestors) & self.used()[..., None]


def _signed(words: Tensor) -> Tensor:
    """Return 32-bit words [...] i64 as the i32 of the same bits: torch narrows none to uint32."""
    return torch.where(words >= 2**31, words - 2**32, words).int()
