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
            that must not be kept: which rows those are is known on the device only, and plain torch has to put them
            somewhere.
        values: [layers, S, P + 1, G, d] float.
        length: [S] i64, rows written in each stream; kept on the CPU, where starts are checked against it.
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

    def advance(self, start: Tensor, count: Tensor, num_rows: int) -> None:
        """Count rows that are about to be written; values are looked at on the CPU only, as a GPU would have to wait.

        Args:
            start: [S] int, absolute position of the first new row.
            count: [S] int, how many of the rows are real; the others are not kept.
            num_rows: rows offered in each stream.

        Raises:
            ShapeError: start or count are not [S].
            ArgumentError: a count is outside 0..num_rows, the rows do not fit, or they would leave a gap after the rows
                written so far.
        """
        check_shape("start", start, (self.num_streams,))
        check_shape("count", count, (self.num_streams,))
        if start.device.type == "cpu":
            self._check_rows(start, count, num_rows)
            self.length.copy_(torch.where(count > 0, start + count, self.length))

    def check_start(self, start: Tensor) -> None:
        """Raise ArgumentError where a start [S] int is negative, or past the rows that its stream holds (CPU only)."""
        if start.device.type == "cpu" and bool(((start < 0) | (start > self.length)).any()):
            raise ArgumentError("start", f"0 to the context's lengths {self.length.tolist()}", start.tolist())

    def _check_rows(self, start: Tensor, count: Tensor, num_rows: int) -> None:
        if bool(((count < 0) | (count > num_rows)).any()):
            raise ArgumentError("count", f"0 to {num_rows}", count.tolist())
        real = count > 0
        if bool((real & ((start < 0) | (start > self.length))).any()):
            raise ArgumentError("start", f"0 to the context's lengths {self.length.tolist()}", start.tolist())
        if bool((real & (start + count > self.max_positions)).any()):
            raise ArgumentError("start + count", f"at most {self.max_positions} positions", (start + count).tolist())
