"""A drafter's forward pass for training: many blocks of one sequence at once, over `Drafter`'s own weights.

Block a of a sequence is [anchor, mask, mask, ...] at positions start[a]..; it sees the context features before its
anchor and itself, both ways, and nothing of the other blocks.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kdlab.kernels.reference import rms_norm
from kdlab.kernels.rope import apply_rope, rope_tables
from kdlab.model.drafter import Drafter
from kdlab.model.drafter_layers import DraftAttention


def position_tables(drafter: Drafter, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make the rope tables of every position that a block in `length` tokens can reach.

    Args:
        drafter: of block size b and head dimension d.
        length: tokens of a sequence.
        device: where the tables go.

    Returns:
        cos and sin, [length + b, d / 2] f32 each.
    """
    return rope_tables(torch.arange(length + drafter.config.block_size), drafter.rope, device)


def draft_blocks(
    drafter: Drafter, taps: Tensor, blocks: Tensor, start: Tensor, tables: tuple[Tensor, Tensor]
) -> Tensor:
    """Draft A blocks in each sequence.

    Args:
        drafter: in float32.
        taps: [S, T, taps * D] float, the target's hidden states at positions 0..T-1.
        blocks: [S, A, b, D] float, embeddings of anchor and masks.
        start: [S, A] i64, position of each anchor, 0..T-1.
        tables: of `position_tables`, for T or more tokens.

    Returns:
        [S, A, b, D] after the final norm.
    """
    num_sequences, num_blocks, width, _ = blocks.shape
    eps = drafter.config.rms_norm_eps
    features = rms_norm(F.linear(taps, drafter.fc).float(), drafter.hidden_norm, eps)
    slots = (start[..., None] + torch.arange(width, device=start.device)).flatten(1)
    context = torch.arange(taps.shape[1], device=start.device)
    cos, sin = tables
    angles = (cos[context], sin[context]), (cos[slots], sin[slots])
    mask = _mask(start, width, context)
    x = blocks.flatten(1, 2)
    for layer in drafter.layers:
        x = x + _attention(layer.attention, rms_norm(x, layer.input_norm, eps), features, angles, mask)
        x = x + layer.mlp(rms_norm(x, layer.post_norm, eps))
    return rms_norm(x, drafter.norm, eps).view(num_sequences, num_blocks, width, -1)


def _mask(start: Tensor, width: int, context: Tensor) -> Tensor:
    """Return [S, 1, A * b, T + A * b] bool: which context rows, then which slots, each slot sees."""
    block = torch.arange(start.shape[1], device=start.device).repeat_interleave(width)
    before = context < start.repeat_interleave(width, dim=1)[..., None]
    same = (block[:, None] == block).expand(len(start), -1, -1)
    return torch.cat([before, same], dim=-1)[:, None]


def _attention(
    weights: DraftAttention,
    x: Tensor,
    features: Tensor,
    angles: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    mask: Tensor,
) -> Tensor:
    (past_cos, past_sin), (cos, sin) = angles
    num_keys = weights.num_keys
    q, own_k, own_v = F.linear(x, weights.qkv).split((weights.num_queries, num_keys, num_keys), dim=-1)
    past_k, past_v = F.linear(features, weights.qkv[weights.num_queries :]).split(num_keys, dim=-1)
    queries = _heads(weights, q, weights.q_norm, cos, sin)
    keys = torch.cat(
        [_heads(weights, past_k, weights.k_norm, past_cos, past_sin), _heads(weights, own_k, weights.k_norm, cos, sin)],
        dim=1,
    )
    values = torch.cat([past_v, own_v], dim=1).unflatten(-1, (-1, weights.head_dim))
    groups = queries.shape[2] // keys.shape[2]
    keys, values = (rows.repeat_interleave(groups, dim=2).transpose(1, 2) for rows in (keys, values))
    o = F.scaled_dot_product_attention(queries.transpose(1, 2), keys, values, attn_mask=mask)
    return F.linear(o.transpose(1, 2).flatten(2), weights.out)


def _heads(weights: DraftAttention, rows: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm and rotate rows [S, n, heads * d]; the result keeps the product's dtype, as the fused attention wants."""
    heads = rms_norm(rows.unflatten(-1, (-1, weights.head_dim)), norm.to(rows.dtype), weights.eps)
    return apply_rope(heads, cos[..., None, :], sin[..., None, :], interleaved=False)
