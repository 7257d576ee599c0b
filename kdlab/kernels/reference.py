"""Every op in plain torch, at any float dtype and on any device: the specification of the kernels."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kdlab.checks import check_shape
from kdlab.kernels.experts import ExpertWeights
from kdlab.kernels.int4 import dequantize_int4
from kdlab.kernels.logits import TopK, draft_topk, target_sample
from kdlab.kernels.mla import attend, cache_rows, compute_dtype, visible_keys

__all__ = [
    "TopK",
    "compute_dtype",
    "dequantize_int4",
    "draft_topk",
    "kv_commit",
    "moe_experts",
    "rms_norm",
    "target_sample",
    "verify_attention",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square, then multiply by the weight.

    Args:
        x: [..., D] float.
        weight: [D] float, in x's dtype.
        eps: added to the mean square.

    Returns:
        [..., D] in x's dtype: the mean in float32 (float64 for float64), rounded to x's dtype before the weight.
    """
    wide = x.to(compute_dtype(x.dtype))
    return F.rms_norm(wide, wide.shape[-1:], None, eps).to(x.dtype) * weight


def verify_attention(
    q: Tensor, pages: Tensor, block_table: Tensor, prefix_len: Tensor, mask: Tensor, scale: float, latent_dim: int
) -> tuple[Tensor, Tensor]:
    """Attend all tree rows to the prefix and to the tree rows that the mask allows, which stand behind it in the cache.

    o[i] = sum over j of softmax_j(scale q[i].kv[j]) kv[j, :C], j over the prefix and {j : mask[i, j]}.

    Args:
        q: [S, N, H, C + R] float, absorbed and rotated.
        pages: [P, 64, C + R] float, one layer; tree row i of stream s at its row prefix_len[s] + i. Rows that nobody
            sees may hold NaN.
        block_table: [S, M] i32, pages of each stream.
        prefix_len: [S] i32.
        mask: [S, N, N] bool.
        scale: factor of the scores.
        latent_dim: C.

    Returns:
        o [S, N, H, C] in q's dtype and lse [S, N, H] f32 in nats; a row without any visible key gives 0 and -inf.

    Raises:
        ShapeError: the arguments do not fit one another.
    """
    num_heads = q.shape[2]
    sizes = check_shape("q", q, ["S", "N", "H", pages.shape[-1]])
    check_shape("mask", mask, [sizes["S"], sizes["N"], sizes["N"]])
    check_shape("block_table", block_table, [sizes["S"], "M"])
    check_shape("prefix_len", prefix_len, [sizes["S"]])
    dtype = compute_dtype(q.dtype)
    keys = visible_keys(
        block_table, prefix_len, mask, page_size=pages.shape[1], num_heads=num_heads, dtype=dtype
    )
    o, scores = attend(q, pages.flatten(0, 1)[keys.rows], keys, scale, latent_dim)
    lse = scores.logsumexp(-1).view(q.shape[:3])
    if keys.empty is not None:
        lse = lse.masked_fill(keys.empty[..., None], -torch.inf)
    return o, lse.float()


def moe_experts(x: Tensor, expert_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    """Run each row through its k experts (SwiGLU) and add the weighted results.

    Rows are grouped by expert, so each distinct expert is read once; a row's sum runs in the order of its ids.

    Args:
        x: [T, D] float.
        expert_ids: [T, k] int.
        weights: [T, k] f32.
        experts: E experts, dense or packed.

    Returns:
        [T, D] in x's dtype, summed in float32 (float64 for float64).
    """
    check_shape("weights", weights, list(expert_ids.shape))
    num_rows, top_k = expert_ids.shape
    flat = expert_ids.flatten().long()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=experts.num_experts).tolist()
    matrices = [experts.matrices(expert, x.dtype) for expert, count in enumerate(counts) if count]
    sizes = [count for count in counts if count]
    groups = x[order // top_k].split(sizes)
    gate, up = torch.cat([F.linear(g, m[0]) for g, m in zip(groups, matrices, strict=True)]).chunk(2, dim=-1)
    hidden = (F.silu(gate) * up).split(sizes)
    out = torch.cat([F.linear(h, m[1]) for h, m in zip(hidden, matrices, strict=True)])
    wide = compute_dtype(x.dtype)
    by_row = torch.empty(out.shape, dtype=wide, device=x.device).index_copy_(0, order, out.to(wide))
    return torch.bmm(weights[:, None].to(wide), by_row.view(num_rows, top_k, -1))[:, 0].to(x.dtype)


def kv_commit(pages: Tensor, block_table: Tensor, prefix_len: Tensor, path: Tensor) -> None:
    """Move the accepted rows down behind the prefix, in place, in all layers; they keep their rotation.

    A node at depth d was rotated at prefix_len + d, which is where it ends up.

    Args:
        pages: [layers, P, 64, W] float.
        block_table: [S, M] i32.
        prefix_len: [S] i32, rows before the root.
        path: [S, L + 1] i32, accepted row indices, root first, -1 padded.
    """
    check_shape("path", path, [block_table.shape[0], "L+1"])
    depth = torch.arange(path.shape[1], device=path.device)
    moved = (path >= 0) & (depth > 0)
    # What does not move is written onto itself: row 0 of the stream, which is nobody's destination.
    first = prefix_len.long()[:, None]
    source = torch.where(moved, first + path, 0)
    destination = torch.where(moved, first + depth, 0)
    page_size = pages.shape[2]
    rows = pages.view(pages.shape[0], -1, pages.shape[-1])
    values = rows[:, cache_rows(block_table, source, page_size).flatten()]
    rows[:, cache_rows(block_table, destination, page_size).flatten()] = values
