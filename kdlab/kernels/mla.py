"""Latent attention (MLA, absorbed form) over a paged cache, in plain torch: which keys a row sees, and the attention.

The keys are found once a forward and serve every layer, so that a layer costs one gather and two products.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kdlab.checks import check_shape
from kdlab.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Keys:
    """What the N rows of each stream may see, for every layer alike."""

    rows: Tensor | None  # [S, T] i64, row of each key in pages.flatten(0, 1); None: the keys are the N rows themselves
    bias: Tensor  # [S, N * H, T] float, 0 where the row sees the key, else -inf; 0 throughout for an empty row
    empty: Tensor | None  # [S, N] bool, the row sees no key at all; None where the CPU found that there is no such row


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums that must not lose bits: float32, or float64 where the data is float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cache_rows(block_table: Tensor, index: Tensor, page_size: int) -> Tensor:
    """Return where the cache rows of each stream stand.

    Args:
        block_table: [S, M] int, pages of each stream.
        index: [S, n] int, row numbers in the stream, 0 to M * page_size - 1.
        page_size: rows a page.

    Returns:
        [S, n] i64, rows of pages.flatten(0, 1).

    Raises:
        ArgumentError: a row lies outside the block table (checked on the CPU, where it costs no synchronisation).
    """
    index = index.long()
    if index.device.type == "cpu" and index.numel():
        low, high = index.aminmax()
        if low < 0 or high >= block_table.shape[1] * page_size:
            expected = f"cache rows 0 to {block_table.shape[1] * page_size - 1} (the block table's)"
            raise ArgumentError("rows", expected, f"{int(low)} to {int(high)}")
    return block_table.long().gather(1, index // page_size) * page_size + index % page_size


def check_pages(places: Tensor, num_rows: int) -> None:
    """Raise ArgumentError where a block table led outside of the pages.

    Args:
        places: i64, rows of pages.flatten(0, 1) that are read or written; looked at on the CPU only.
        num_rows: rows of all pages.
    """
    if places.device.type != "cpu" or not places.numel():
        return
    low, high = places.aminmax()
    if low < 0 or high >= num_rows:
        raise ArgumentError("block_table", f"pages that hold rows 0 to {num_rows - 1}", f"{int(low)} to {int(high)}")


def visible_keys(
    block_table: Tensor, prefix_len: Tensor, mask: Tensor, *, page_size: int, num_heads: int, dtype: torch.dtype
) -> Keys:
    """Find the keys of N rows that stand in the cache behind each stream's prefix.

    Args:
        block_table: [S, M] int.
        prefix_len: [S] int, committed rows; every row of the stream sees them.
        mask: [S, N, N] bool, row i sees row j of the same call.
        page_size: rows a page.
        num_heads: H.
        dtype: float dtype of the bias.

    Returns:
        Keys over T rows: the longest prefix + N on the CPU, the whole block table on a GPU (no synchronisation).

    Raises:
        ArgumentError: a visible row lies outside the block table (checked on the CPU).
    """
    check_shape("mask", mask, ["S", mask.shape[-1], mask.shape[-1]])
    num_rows, device = mask.shape[1], mask.device
    everything = block_table.shape[1] * page_size
    num_keys = int(prefix_len.max()) + num_rows if device.type == "cpu" else everything
    index = torch.arange(num_keys, device=device)
    behind = index - prefix_len.long()[:, None]
    in_tree = ((behind >= 0) & (behind < num_rows))[:, None]
    tree_row = behind.clamp(0, num_rows - 1)[:, None].expand(-1, num_rows, -1)
    visible = (behind < 0)[:, None] | (mask.gather(2, tree_row) & in_tree)
    # A hidden row may hold NaN, and 0 times NaN is NaN: read a visible row of the stream in its stead.
    seen = visible.any(1)
    first = seen.byte().argmax(1, keepdim=True)
    rows = cache_rows(block_table, torch.where(seen, index, first), page_size)
    return Keys(rows, *_bias(visible, num_heads, dtype))


def own_keys(mask: Tensor, *, num_heads: int, dtype: torch.dtype) -> Keys:
    """Return the Keys of rows that see one another and no cache; mask [S, N, N] bool."""
    return Keys(None, *_bias(mask, num_heads, dtype))


def _bias(visible: Tensor, num_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    empty = ~visible.any(-1)
    # An empty row may see everything here and is zeroed after: all -inf would send NaN into the gradients.
    hidden = ~(visible | empty[..., None])
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
    known_full = empty.device.type == "cpu" and not bool(empty.any())
    return bias.repeat_interleave(num_heads, dim=1), None if known_full else empty


def attend(q: Tensor, kv: Tensor, keys: Keys, scale: float, latent_dim: int) -> tuple[Tensor, Tensor]:
    """Attend all heads to one shared key a cache row; its first C values are the value too.

    Args:
        q: [S, N, H, C + R] float, absorbed and rotated.
        kv: [S, T, C + R] float, the rows that `keys` names.
        keys: what each row sees.
        scale: factor of the scores.
        latent_dim: C.

    Returns:
        o [S, N, H, C] in q's dtype, 0 for an empty row, and the scores [S, N * H, T] in float32 (float64 for float64)
        that it was formed from.
    """
    num_streams, num_rows, num_heads, width = q.shape
    wide = compute_dtype(q.dtype)
    kv = kv.to(wide)
    queries = q.reshape(num_streams, num_rows * num_heads, width).to(wide)
    scores = torch.baddbmm(keys.bias, queries, kv.transpose(1, 2), alpha=scale)
    o = torch.bmm(scores.softmax(-1), kv[..., :latent_dim])
    o = o.view(num_streams, num_rows, num_heads, latent_dim)
    if keys.empty is not None:
        o = o.masked_fill(keys.empty[..., None, None], 0)
    return o.to(q.dtype), scores
