"""What a round leaves for the host: one row of numbers a stream, copied to host memory while the device goes on."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kdlab.decode.records import RoundRecord
from kdlab.decode.streams import Streams
from kdlab.kernels.ancestors import num_words
from kdlab.kernels.pack_words import pack_words
from kdlab.tree import Acceptance, DraftTree

_TREE_ROWS = ("token", "parent", "depth", "logp", "rank", "first_child", "next_sibling")
_TREE_NUMBERS = ("num_nodes", "truncated", "nonfinite_rows")
_ACCEPTED_NUMBERS, _STREAM_NUMBERS = ("length", "bonus", "status"), ("prompt", "start", "running")
_BIT_FIELDS = {"logp": np.float32, "missed_mass": np.float32, "ancestors": np.uint32}  # by their bits, the rest as i32


class RoundBuffer:
    """The record of one round of S streams, on the device.

    Attributes:
        words: [S, W] i32, the fields of a stream side by side.
        expert_ids: [S, MoE layers, N, k] i16, or None where they are not recorded.
    """

    def __init__(
        self,
        num_streams: int,
        num_rows: int,
        depth_limit: int,
        device: torch.device,
        experts: tuple[int, int] | None = None,
    ) -> None:
        """Lay the buffers out for trees of `num_rows` rows and paths of `depth_limit`; `experts` is (MoE layers, k)."""
        self.depth_limit = depth_limit
        numbers = (*_TREE_NUMBERS, *_ACCEPTED_NUMBERS, *_STREAM_NUMBERS)
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys((*_TREE_ROWS, "target_tokens"), (num_rows,)),
            "ancestors": (num_rows, num_words(num_rows)),
            "missed_mass": (depth_limit,),
            "path": (depth_limit + 1,),
            **dict.fromkeys(numbers, ()),
        }
        ends = np.cumsum([math.prod(shape) for shape in shapes.values()]).tolist()
        self._fields = {
            name: (slice(end - math.prod(shape), end), _BIT_FIELDS.get(name, np.int32), (num_streams, *shape))
            for (name, shape), end in zip(shapes.items(), ends, strict=True)
        }
        self.words = torch.zeros(num_streams, ends[-1], dtype=torch.int32, device=device)
        self.expert_ids = None
        if experts is not None:
            layers, top_k = experts
            self.expert_ids = torch.zeros(num_streams, layers, num_rows, top_k, dtype=torch.int16, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """What goes to the host."""
        return [self.words] if self.expert_ids is None else [self.words, self.expert_ids]

    def write(
        self,
        streams: Streams,
        tree: DraftTree,
        target_tokens: Tensor,
        acceptance: Acceptance,
        expert_ids: Tensor | None,
        impl: str = "auto",
    ) -> None:
        """Keep a round, from the streams as they were before it; `impl` is what `pack_words` runs as."""
        found = {name: getattr(tree, name) for name in (*_TREE_ROWS, *_TREE_NUMBERS, "ancestors", "missed_mass")}
        found |= {name: getattr(acceptance, name) for name in ("path", *_ACCEPTED_NUMBERS)}
        found |= {name: getattr(streams, name) for name in _STREAM_NUMBERS}
        found["target_tokens"] = target_tokens
        pack_words([found[name] for name in self._fields], self.words, impl=impl)
        if self.expert_ids is not None and expert_ids is not None:
            self.expert_ids.copy_(expert_ids)

    def read(self, words: np.ndarray) -> dict[str, np.ndarray]:
        """Return the fields of all streams, [S, ...] each, as views of `words` [S, W] i32."""
        fields = self._fields.items()
        return {name: words[:, place].view(dtype).reshape(shape) for name, (place, dtype, shape) in fields}

    def record(
        self, fields: Mapping[str, np.ndarray], slot: int, index: int, expert_ids: np.ndarray | None
    ) -> RoundRecord:
        """Make the record of one stream's round.

        Args:
            fields: of `read`; the record keeps views of them.
            slot: of the stream.
            index: of the round in its prompt.
            expert_ids: [S, MoE layers, N, k] i16, of which the stream's are copied; or None.
        """
        rows, length = int(fields["num_nodes"][slot]), int(fields["length"][slot])
        return RoundRecord(
            prompt=int(fields["prompt"][slot]),
            round=index,
            anchor_position=int(fields["start"][slot]),
            tree=self._tree(fields, slot, rows),
            target_tokens=fields["target_tokens"][slot, :rows],
            path=tuple(fields["path"][slot, : length + 1].tolist()),
            bonus=int(fields["bonus"][slot]),
            expert_ids=None if expert_ids is None else expert_ids[slot, :, :rows].copy(),
            nonfinite_draft_rows=int(fields["nonfinite_rows"][slot]),
        )

    def _tree(self, fields: Mapping[str, np.ndarray], slot: int, rows: int) -> DraftTree:
        one = slice(slot, slot + 1)
        arrays = {name: fields[name][one, :rows] for name in _TREE_ROWS}
        arrays["ancestors"] = np.ascontiguousarray(fields["ancestors"][one, :rows, : num_words(rows)])
        arrays |= {name: fields[name][one] for name in ("num_nodes", "nonfinite_rows", "missed_mass")}
        arrays["truncated"] = fields["truncated"][one] != 0
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return DraftTree(**tensors, depth_limit=self.depth_limit)


class Mailbox:
    """Copies of device buffers in host memory; the host reads one round's while the device writes the next ones."""

    def __init__(self, sources: Sequence[Tensor], depth: int) -> None:
        """Make room for `depth` posts that have not been taken, in memory that the device writes by itself."""
        on_gpu = sources[0].is_cuda
        self._sources = sources
        self._copies = [
            [torch.empty(one.shape, dtype=one.dtype, pin_memory=on_gpu) for one in sources] for _ in range(depth)
        ]
        self._written = [torch.cuda.Event() if on_gpu else None for _ in range(depth)]
        self._num_posted = self._num_taken = 0

    def __len__(self) -> int:
        """Posts that have not been taken."""
        return self._num_posted - self._num_taken

    def post(self) -> None:
        """Copy the sources behind the work that is queued on the device; nothing waits."""
        place = self._num_posted % len(self._copies)
        for copy, source in zip(self._copies[place], self._sources, strict=True):
            copy.copy_(source, non_blocking=True)
        event = self._written[place]
        if event is not None:
            # The copies are on the stream of the sources' device, which need not be the current device.
            event.record(torch.cuda.current_stream(self._sources[0].device))
        self._num_posted += 1

    def take(self) -> list[np.ndarray]:
        """Wait for the oldest post and return its arrays, which the post after `depth` more overwrites."""
        place = self._num_taken % len(self._copies)
        event = self._written[place]
        if event is not None:
            event.synchronize()
        self._num_taken += 1
        return [copy.numpy() for copy in self._copies[place]]
