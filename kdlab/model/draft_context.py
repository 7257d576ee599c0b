"""The drafter's memory of committed tokens: keys and values of their context features, a stream a row."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kdlab.checks import check_int, check_shape
from kdlab.config import DrafterConfig, RopeConfig
from kdlab.errors import ArgumentError
from kdlab.kernels.rope import rope_tables


@dataclass(eq=False, slots=True)
class DraftContext:
    """Keys and values by layer, stream and absolute position, allocated once and written in place.

    Attributes:
        keys: [layers, S, P + 1, G, d] float, normed and rotated, of G key heads of width d. Row P is a bin for rows
            that must not be kept: which rows those are is known on the device only.
        values: [layers, S, P + 1, G, d] float.
        length: [S] i64, rows written in each stream.
        cos: [P + b, d/2] f32 by absolute position, as far as a block of b slots can reach; sin alike.
        sin: [P + b, d/2] f32.
    """

    keys: Tensor
    values: Tensor
    length: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def allocate(
        cls,
        config: DrafterConfig,
        rope: RopeConfig,
        num_streams: int,
        max_positions: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> "DraftContext":
        """Allocate an empty context of `num_streams` streams with room for `max_positions` tokens each."""
        check_int("num_streams", num_streams, minimum=1)
        check_int("max_positions", max_positions, minimum=1)
        shape = (
            config.num_hidden_layers,
            num_streams,
            max_positions + 1,
            config.num_key_value_heads,
            config.head_dim,
        )
        cos, sin = rope_tables(torch.arange(max_positions + config.block_size), rope, device)
        return cls(
            keys=torch.zeros(shape, device=device, dtype=dtype),
            values=torch.zeros(shape, device=device, dtype=dtype),
            length=torch.zeros(num_streams, device=device, dtype=torch.int64),
            cos=cos,
            sin=sin,
        )

    @property
    def num_streams(self) -> int:
        """Streams S."""
        return self.keys.shape[1]

    @property
    def max_positions(self) -> int:
        """Positions P that a stream has room for."""
        return self.keys.shape[2] - 1

    def stream(self, index: int) -> "DraftContext":
        """Return the one stream `index` as a context of its own that shares this one's memory."""
        one = slice(index, index + 1)
        return replace(self, keys=self.keys[:, one], values=self.values[:, one], length=self.length[one])

    def rope_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [..., 1, d/2] f32 (one axis for the heads), at `positions` [...] int."""
        return self.cos[positions][..., None, :], self.sin[positions][..., None, :]

    def rows_for(self, start: Tensor, count: Tensor, num_rows: int) -> Tensor:
        """Return where `num_rows` new rows of each stream go, and count them as written.

        Args:
            start: [S] int, absolute position of the first new row.
            count: [S] int, how many of the rows are real; the others go to the bin.
            num_rows: rows offered in each stream.

        Returns:
            [S, num_rows] i64 row indices of `keys` and `values`.

        Raises:
            ShapeError: start or count are not [S].
            ArgumentError: (values on the CPU only: reading them would stall a GPU) a count is outside 0..num_rows, the
                rows do not fit, or they would leave a gap after the rows written so far.
        """
        check_shape("start", start, (self.num_streams,))
        check_shape("count", count, (self.num_streams,))
        start, count = start.long(), count.long()
        end = start + count
        if start.device.type == "cpu":
            self._check_rows(start, count, num_rows)
        row = torch.arange(num_rows, device=start.device)
        rows = torch.where(row < count[:, None], start[:, None] + row, self.max_positions)
        self.length.copy_(torch.where(count > 0, end, self.length))
        return rows

    def num_visible(self, start: Tensor) -> int:
        """Return how many leading rows a draft from `start` [S] int has to look at, at most `max_positions`.

        Raises:
            ArgumentError: (CPU only) a start is negative, or past the rows that its stream holds.
        """
        if start.device.type != "cpu":
            return self.max_positions
        if bool(((start < 0) | (start > self.length)).any()):
            raise ArgumentError("start", f"0 to the context's lengths {self.length.tolist()}", start.tolist())
        return int(start.max())

    def _check_rows(self, start: Tensor, count: Tensor, num_rows: int) -> None:
        if bool(((count < 0) | (count > num_rows)).any()):
            raise ArgumentError("count", f"0 to {num_rows}", count.tolist())
        real = count > 0
        if bool((real & ((start < 0) | (start > self.length))).any()):
            raise ArgumentError("start", f"0 to the context's lengths {self.length.tolist()}", start.tolist())
        if bool((real & (start + count > self.max_positions)).any()):
            raise ArgumentError("start + count", f"at most {self.max_positions} positions", (start + count).tolist())
