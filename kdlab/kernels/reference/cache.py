"""The ops around the latent cache in plain torch: `norm_rope`, and the gather that `kv_commit` does besides."""

import torch
from torch import Tensor

from kdlab.kernels.mla import cache_rows, check_pages
from kdlab.kernels.reference.ops import rms_norm
from kdlab.kernels.rope import apply_rope


def norm_rope(
    kv: Tensor,
    q_rope: Tensor,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    num_nodes: Tensor,
    q: Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> None:
    """Norm the latents, rotate keys and queries, and write the used rows to the cache and to q.

    Args:
        kv: [S, N, C + R] float, the raw output of kv_a.
        q_rope: [S, N, H, R] float, not yet rotated.
        norm_weight: [C] float, of the kv_a norm.
        cos: [S, N, R/2] f32 of each row's position; sin alike.
        sin: [S, N, R/2] f32.
        pages: [P, 64, C + R] float, one layer; rows prefix_len .. prefix_len + num_nodes - 1 are written.
        block_table: [S, M] i32, pages of each stream.
        prefix_len: [S] i32.
        num_nodes: [S] i32, rows in use; the others are left alone, in the cache and in q.
        q: [S, N, H, C + R] float; q[..., C:] is written.
        eps: of the norm.
        interleaved: layout of the pairs, see `apply_rope`.

    Raises:
        ArgumentError: a used row lies outside the block table or the pages (checked on the CPU).
    """
    latent_dim = norm_weight.shape[0]
    rows = torch.arange(kv.shape[1], device=kv.device)
    used = rows < num_nodes[:, None]
    latent, k_rope = kv.split([latent_dim, kv.shape[-1] - latent_dim], dim=-1)
    new = torch.cat([rms_norm(latent, norm_weight, eps), apply_rope(k_rope, cos, sin, interleaved)], dim=-1)
    # Index by index, as the number of used rows differs from stream to stream; unused ones may lie past the table.
    streams, row = used.nonzero(as_tuple=True)
    index = torch.where(used, prefix_len.long()[:, None] + rows, 0)
    flat, places = pages.view(-1, pages.shape[-1]), cache_rows(block_table, index, pages.shape[1])[streams, row]
    check_pages(places, flat.shape[0])
    flat[places] = new[streams, row]
    turned = apply_rope(q_rope, cos[:, :, None], sin[:, :, None], interleaved)
    q[streams, row, :, latent_dim:] = turned[streams, row]


def gather_path(rows: Tensor, path: Tensor) -> Tensor:
    """Return the rows [S, N, F] that path [S, L + 1] int names, [S, L + 1, F]; zeros where it names none."""
    known = (path >= 0) & (path < rows.shape[1])
    index = torch.where(known, path, 0).long()[..., None].expand(-1, -1, rows.shape[-1])
    return rows.gather(1, index).masked_fill(~known[..., None], 0)
