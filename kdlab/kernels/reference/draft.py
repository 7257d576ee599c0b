"""The drafter's ops in plain torch, at any float dtype and on any device; on a GPU without waiting for it."""

import torch
from torch import Tensor

from kdlab.kernels.mla import compute_dtype
from kdlab.kernels.reference.ops import rms_norm
from kdlab.kernels.rope import apply_rope


def draft_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: Tensor, *, window: int | None, causal: bool
) -> Tensor:
    """Attend a block's slots to the context before it and to the block itself.

    o[i] = sum over j of softmax_j(q[i].k[j] / sqrt(d)) v[j]; slot i stands at absolute position start + i.

    Args:
        q: [S, b, H, d] float, normed and rotated, as all keys are.
        k, v: [S, b, G, d] float, of the block; query head h reads key head h // (H / G).
        keys, values: [C, P, G, d] float, of the context; C is S, or 1 for all streams. Rows from start on may hold NaN.
        start: [S] int, context rows that each stream sees.
        window: a slot sees keys less than this far to either side, itself included; None for all.
        causal: a slot does not see later ones.

    Returns:
        [S, b, H, d] in q's dtype; sums are float32, or float64 for float64.
    """
    # What was never written may hold anything, and zero times NaN is NaN.
    num_context = int(start.max()) if start.device.type == "cpu" else keys.shape[1]
    limit = start.view(keys.shape[0], -1).amax(dim=1, keepdim=True)
    unseen = (torch.arange(num_context, device=start.device) >= limit)[..., None, None]
    past = tuple(rows[:, :num_context].masked_fill(unseen, 0) for rows in (keys, values))
    mask = _visible(start, num_context, q.shape[1], window, causal)
    return _attend(q, past, (k, v), mask).to(q.dtype)


def _visible(start: Tensor, num_context: int, width: int, window: int | None, causal: bool) -> Tensor:
    """Return [S, b, num_context + b] bool: which context rows, then which slots, each slot sees."""
    slot = torch.arange(width, device=start.device)
    row = torch.arange(num_context, device=start.device)
    start = start.long()[:, None]
    key = torch.cat((row.expand(len(start), -1), start + slot), dim=1)
    committed = torch.cat((row < start, torch.ones_like(start + slot, dtype=torch.bool)), dim=1)
    ahead = key[:, None, :] - (start + slot)[:, :, None]
    visible = committed[:, None, :].expand_as(ahead)
    if causal:
        visible = visible & (ahead <= 0)
    return visible if window is None else visible & (ahead.abs() < window)


def _attend(queries: Tensor, past: tuple[Tensor, ...], block: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """Softmax attention of queries [S, b, H, d] over past keys and values [C, n, G, d] and a block's [S, b, G, d].

    With one context for all streams (C = 1) the streams become rows of one product, so that nothing is copied a stream.
    Sums are float32, or float64 for float64. Returns [S, b, H, d] in that dtype.
    """
    wide = compute_dtype(queries.dtype)
    num_streams, width, num_heads, head_dim = queries.shape
    num_contexts, num_past, kv_heads, _ = past[0].shape
    shape = (num_contexts, num_streams // num_contexts, width, kv_heads, num_heads // kv_heads, head_dim)
    q = (queries.to(wide) * head_dim**-0.5).reshape(shape).permute(0, 3, 1, 4, 2, 5).contiguous()  # [C,G,m,H/G,b,d]
    past_k, past_v = (rows.to(wide).transpose(1, 2) for rows in past)  # [C, G, n, d]
    block_k, block_v = (
        rows.to(wide).reshape(*shape[:4], head_dim).permute(0, 3, 1, 2, 4) for rows in block
    )  # [C, G, m, b, d]
    by_context, by_stream = q.flatten(2, 4), q.flatten(3, 4)
    lead = q.shape[:-1]
    scores = torch.cat(
        (
            (by_context @ past_k.transpose(-1, -2)).view(*lead, num_past),
            (by_stream @ block_k.transpose(-1, -2)).view(*lead, width),
        ),
        dim=-1,
    )
    hidden = ~mask.view(num_contexts, 1, shape[1], 1, width, -1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    on_past, on_block = weights.split((num_past, width), dim=-1)
    mixed = (on_past.flatten(2, 4) @ past_v).view_as(q) + (on_block.flatten(3, 4) @ block_v).view_as(q)
    return mixed.permute(0, 2, 4, 1, 3, 5).reshape(queries.shape)


def head_norm_rope(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    *,
    num_queries: int,
    eps: float,
) -> Tensor:
    """Norm each head of a block's queries and keys and rotate it by its slot's absolute position.

    Args:
        x: [S, n, H, d] float, queries in the first heads, keys in the others.
        q_weight, k_weight: [d] float, of the norms.
        cos: [M, d/2] f32 by absolute position; sin alike.
        sin: [M, d/2] f32.
        start: [S] int, position of row 0 of each stream; positions outside the tables take the nearest.
        num_queries: heads that are queries.
        eps: of the norms.

    Returns:
        [S, n, H, d] in x's dtype.
    """
    c, s = _angles(cos, sin, _positions(start, x.shape[1]))
    parts = x.split((num_queries, x.shape[2] - num_queries), dim=2)
    normed = (rms_norm(part, weight, eps) for part, weight in zip(parts, (q_weight, k_weight), strict=True))
    return torch.cat([apply_rope(part, c, s, interleaved=False) for part in normed], dim=2)


def append_context(
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    count: Tensor,
    *,
    eps: float,
) -> None:
    """Write normed, rotated keys and the values of committed rows into the context of all layers.

    Args:
        k, v: [layers, S, n, G, d] float, not yet normed.
        weight: [layers, d] float, of the keys' norms.
        cos: [M, d/2] f32 by absolute position; sin alike.
        sin: [M, d/2] f32.
        keys, values: [layers, S, P, G, d] float; row i of a stream goes to its row start + i. The last one is a bin,
            where rows from count on and rows without a place go here (how many those are is known on the device only).
        start: [S] int.
        count: [S] int, rows of each stream that are real.
        eps: of the norm.
    """
    position = _positions(start, k.shape[2])
    row = torch.arange(k.shape[2], device=k.device)
    bin_row = keys.shape[2] - 1
    kept = (row < count[:, None]) & (position >= 0) & (position < bin_row)
    where = torch.where(kept, position, bin_row)
    stream = torch.arange(k.shape[1], device=k.device)[:, None]
    angles = _angles(cos, sin, position)
    for layer in range(len(k)):
        normed = rms_norm(k[layer], weight[layer], eps)
        keys[layer, stream, where] = apply_rope(normed, *angles, interleaved=False)
        values[layer, stream, where] = v[layer]


def _positions(start: Tensor, num_rows: int) -> Tensor:
    return start.long()[:, None] + torch.arange(num_rows, device=start.device)


def _angles(cos: Tensor, sin: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [S, n, 1, d/2] at each position."""
    inside = position.clamp(0, cos.shape[0] - 1)
    return cos[inside][:, :, None], sin[inside][:, :, None]
