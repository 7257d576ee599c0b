"""One decoder layer of the DFlash drafter: its rows attend to the context and to each other."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from kdlab.config import DrafterConfig
from kdlab.kernels.reference import compute_dtype, rms_norm
from kdlab.kernels.rope import apply_rope
from kdlab.model.draft_context import DraftContext


class RmsNorm(nn.Module):
    """RMS norm with a weight, over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., width] float."""
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class BlockView:
    """What one draft forward sees, the same in every layer.

    Attributes:
        start: [S] i64, context rows that each stream sees.
        num_context: rows of the context to look at, at least start.max().
        cos: [S, b, 1, d/2] f32 at the block's absolute positions; sin alike.
        sin: [S, b, 1, d/2] f32.
        context: of S streams, or of one that all S share.
    """

    start: Tensor
    num_context: int
    cos: Tensor
    sin: Tensor
    context: DraftContext

    def mask(self, window: int | None, causal: bool) -> Tensor:
        """Return [S, b, num_context + b] bool: which context rows, then which slots, each slot sees.

        Args:
            window: tokens that a slot sees to either side, itself included; None for all.
            causal: a slot does not see later ones.
        """
        slot = torch.arange(self.cos.shape[1], device=self.start.device)
        row = torch.arange(self.num_context, device=self.start.device)
        start = self.start[:, None]
        key = torch.cat((row.expand(len(start), -1), start + slot), dim=1)
        committed = torch.cat((row < start, torch.ones_like(start + slot, dtype=torch.bool)), dim=1)
        ahead = key[:, None, :] - (start + slot)[:, :, None]
        visible = committed[:, None, :].expand_as(ahead)
        if causal:
            visible = visible & (ahead <= 0)
        return visible if window is None else visible & (ahead.abs() < window)

    def context_rows(self, rows: Tensor) -> Tensor:
        """Return the leading rows of `rows` [C, P + 1, G, d], with zeros where no stream sees them (C is S or 1).

        What was never written may hold anything, and zero times NaN is NaN.
        """
        limit = self.start.view(rows.shape[0], -1).amax(dim=1, keepdim=True)
        unseen = torch.arange(self.num_context, device=rows.device) >= limit
        return rows[:, : self.num_context].masked_fill(unseen[..., None, None], 0)


class DraftAttention(nn.Module):
    """Grouped-query attention with normed, rotated queries and keys over [context ; block]."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.kv_heads = config.num_key_value_heads
        width, kv_width = config.num_attention_heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RmsNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of rows x.

        Args:
            x: [S, n, D] float: context features as they are, or a block's rows after the input norm.
            cos: [S, n, 1, d/2] f32 at the rows' absolute positions; sin alike.
            sin: [S, n, 1, d/2] f32.

        Returns:
            Two tensors [S, n, G, d] in x's dtype.
        """
        heads = (*x.shape[:2], self.kv_heads, self.head_dim)
        keys = apply_rope(self.k_norm(self.k_proj(x).view(heads)), cos, sin, interleaved=False)
        return keys, self.v_proj(x).view(heads)

    def forward(self, x: Tensor, view: BlockView, mask: Tensor) -> Tensor:
        """Return [S, b, D]: the attention of block rows x [S, b, D] under `mask` [S, b, num_context + b] bool."""
        queries = self.q_norm(self.q_proj(x).view(*x.shape[:2], -1, self.head_dim))
        queries = apply_rope(queries, view.cos, view.sin, interleaved=False)
        keys, values = self.keys_values(x, view.cos, view.sin)
        past = [view.context_rows(rows[self.layer]) for rows in (view.context.keys, view.context.values)]
        mixed = _attend(queries, (past[0], past[1]), (keys, values), mask)
        return self.o_proj(mixed.to(x.dtype).flatten(2))


def _attend(queries: Tensor, past: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """Softmax attention of queries [S, b, H, d] over past keys and values [C, n, G, d] and a block's [S, b, G, d].

    With one context for all streams (C = 1) the streams become rows of one product, so that nothing is copied a stream.
    Sums are float32, or float64 for float64. Returns [S, b, H, d] in that dtype.
    """
    wide = compute_dtype(queries.dtype)
    num_streams, width, num_heads, head_dim = queries.shape
    num_contexts, num_past, kv_heads, _ = past[0].shape
    shape = (num_contexts, num_streams // num_contexts, width, kv_heads, num_heads // kv_heads, head_dim)
    q = queries.to(wide).view(shape).permute(0, 3, 1, 4, 2, 5) * head_dim**-0.5  # [C, G, m, H/G, b, d]
    past_k, past_v = (rows.to(wide).transpose(1, 2) for rows in past)  # [C, G, n, d]
    block_k, block_v = (
        rows.to(wide).view(*shape[:4], head_dim).permute(0, 3, 1, 2, 4) for rows in block
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


class SwiGlu(nn.Module):
    """Feed-forward block: down(silu(gate x) * up x)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., D] of x [..., D] float."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Attention and feed-forward block, each behind its norm and added to the residual stream."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, layer)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGlu(config)

    def forward(self, hidden: Tensor, view: BlockView, mask: Tensor) -> Tensor:
        """Return the residual stream [S, b, D] after this layer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), view, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
