"""The latent cache: pages of 64 rows a layer, one row a token, with a block table that says whose pages are whose."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdlab.checks import check_int
from kdlab.config import TargetConfig
from kdlab.kernels.constants import PAGE_SIZE
from kdlab.kernels.kv_commit import kv_commit
from kdlab.kernels.mla import Keys, cache_rows, compute_dtype, visible_keys


@dataclass(frozen=True, eq=False)
class LatentCache:
    """Rows [latent C, rotated key R] of every token and layer.

    Attributes:
        pages: [layers, P, 64, W] float.
        block_table: [S, M] i32, pages of each stream in order.
    """

    pages: Tensor
    block_table: Tensor

    @classmethod
    def allocate(
        cls,
        config: TargetConfig,
        num_streams: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "LatentCache":
        """Make a cache that holds `max_rows` rows a stream, tree rows included."""
        check_int("num_streams", num_streams, minimum=1)
        check_int("max_rows", max_rows, minimum=1)
        pages_each = -(-max_rows // PAGE_SIZE)
        shape = (config.num_hidden_layers, num_streams * pages_each, PAGE_SIZE, config.cache_width)
        table = torch.arange(num_streams * pages_each, dtype=torch.int32, device=device)
        return cls(torch.zeros(shape, dtype=dtype, device=device), table.view(num_streams, pages_each))

    @property
    def max_rows(self) -> int:
        """Rows that a stream may hold."""
        return self.block_table.shape[1] * PAGE_SIZE

    def stream(self, index: int) -> "LatentCache":
        """Return the one stream `index` as a cache of its own that shares this one's pages."""
        return LatentCache(self.pages, self.block_table[index : index + 1])

    def places(self, start: Tensor, num_rows: int) -> Tensor:
        """Return where rows start..start + num_rows - 1 of each stream stand in `pages.flatten(1, 2)`, [S, N] i64."""
        index = start.long()[:, None] + torch.arange(num_rows, device=start.device)
        return cache_rows(self.block_table, index, PAGE_SIZE)

    def write(self, layer: int, rows: Tensor, start: Tensor) -> None:
        """Write rows [S, N, W] of one layer at start [S]..start + N - 1 of each stream."""
        self.write_at(layer, rows, self.places(start, rows.shape[1]))

    def write_at(self, layer: int, rows: Tensor, places: Tensor) -> None:
        """Write rows [S, N, W] of one layer at `places` [S, N]; no gradient flows through the cache."""
        flat = self.pages[layer].view(-1, self.pages.shape[-1])
        flat.index_copy_(0, places.flatten(), rows.detach().flatten(0, 1).to(flat.dtype))

    def read_at(self, layer: int, places: Tensor) -> Tensor:
        """Return the rows [S, T, W] of one layer at `places` [S, T]."""
        flat = self.pages[layer].view(-1, self.pages.shape[-1])
        return flat.index_select(0, places.flatten()).view(*places.shape, -1)

    def keys(self, start: Tensor, mask: Tensor, num_heads: int) -> Keys:
        """Return what N rows written at `start` [S] may see under mask [S, N, N]."""
        dtype = compute_dtype(self.pages.dtype)
        return visible_keys(self.block_table, start, mask, page_size=PAGE_SIZE, num_heads=num_heads, dtype=dtype)

    def commit(
        self, start: Tensor, path: Tensor, taps: Sequence[Tensor] = (), impl: str = "auto"
    ) -> Tensor | None:
        """Move the rows of each stream's path to start, start + 1, ... in all layers; see `kv_commit`.

        Args:
            start: [S] int, committed rows before the root.
            path: [S, L + 1] int, rows of the tree, root first, -1 padded.
            taps: [S, N, F] each, rows of the tree to be gathered along the path.
            impl: of kv_commit.

        Returns:
            The taps side by side along the path [S, L + 1, taps * F], zeros where it is -1; None without taps.
        """
        return kv_commit(self.pages, self.block_table, start.int(), path.int(), taps=taps, impl=impl)
