"""One decoder layer of the DFlash drafter: its rows attend to the context and to each other."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kdlab.config import DrafterConfig
from kdlab.kernels.reference import compute_dtype, rms_norm
from kdlab.kernels.rope import apply_rope
from kdlab.model.draft_context import DraftContext
from kdlab.model.layers import Part, SwiGlu, parts, prefixed, weight, wholes
from kdlab.model.ranks import ONE_RANK, Ranks


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

    @classmethod
    def of(cls, start: Tensor, width: int, context: DraftContext) -> "BlockView":
        """Return the view of blocks of `width` slots that begin at `start` [S] i64; it looks up rope once for all."""
        num_context = context.num_visible(start)
        cos, sin = context.rope_at(start[:, None] + torch.arange(width, device=start.device))
        return cls(start, num_context, cos, sin, context)

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

    def seen(self, rows: Tensor) -> Tensor:
        """Return the leading rows of `rows` [C, P + 1, G, d], with zeros where no stream sees them (C is S or 1).

        What was never written may hold anything, and zero times NaN is NaN.
        """
        limit = self.start.view(rows.shape[0], -1).amax(dim=1, keepdim=True)
        unseen = torch.arange(self.num_context, device=rows.device) >= limit
        return rows[:, : self.num_context].masked_fill(unseen[..., None, None], 0)


class DraftAttention(nn.Module):
    """Grouped-query attention with normed, rotated queries and keys over [context ; block]; a rank holds some heads."""

    def __init__(
        self,
        config: DrafterConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        super().__init__()
        self.config, self.layer, self.head_dim, self.eps = config, layer, config.head_dim, config.rms_norm_eps
        self.heads = ranks.span(config.num_attention_heads, name="the drafter's num_attention_heads")
        self.kv_heads = ranks.shared_span(config.num_key_value_heads, name="the drafter's num_key_value_heads")
        self.num_queries = (self.heads.stop - self.heads.start) * self.head_dim
        self.num_keys = (self.kv_heads.stop - self.kv_heads.start) * self.head_dim
        # Queries, keys and values of a block in one product; of the context the last two parts.
        self.qkv = weight(self.num_queries + 2 * self.num_keys, config.hidden_size, dtype=dtype, device=device)
        self.out = weight(config.hidden_size, self.num_queries, dtype=dtype, device=device)
        self.q_norm = weight(self.head_dim, dtype=dtype, device=device)
        self.k_norm = weight(self.head_dim, dtype=dtype, device=device)

    def views(self) -> dict[str, Part]:
        """Return the weights by checkpoint name."""
        q, k, v = self.qkv.split((self.num_queries, self.num_keys, self.num_keys))
        queries, keys = self._span(self.heads), self._span(self.kv_heads)
        width = self.config.num_attention_heads * self.head_dim
        kv_width = self.config.num_key_value_heads * self.head_dim
        found = parts(0, queries, width, q_proj=q) | parts(0, keys, kv_width, k_proj=k, v_proj=v)
        return found | parts(1, queries, width, o_proj=self.out) | wholes(q_norm=self.q_norm, k_norm=self.k_norm)

    def _span(self, heads: slice) -> slice:
        return slice(heads.start * self.head_dim, heads.stop * self.head_dim)

    def context_rows(self, features: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of context features, which pass no norm of this layer.

        Args:
            features: [S, n, D] float.
            cos: [S, n, 1, d/2] f32 at the rows' absolute positions; sin alike.
            sin: [S, n, 1, d/2] f32.

        Returns:
            Two tensors [S, n, G, d] in the features' dtype.
        """
        keys, values = linear(features, self.qkv[self.num_queries :]).split(self.num_keys, dim=-1)
        return self._heads(keys, self.k_norm, cos, sin), values.unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, view: BlockView, mask: Tensor) -> Tensor:
        """Return [S, b, D], this rank's summand: block rows x [S, b, D] attend under `mask` [S, b, num_context + b]."""
        q, k, v = linear(x, self.qkv).split((self.num_queries, self.num_keys, self.num_keys), dim=-1)
        queries, keys = self._heads(q, self.q_norm, view.cos, view.sin), self._heads(k, self.k_norm, view.cos, view.sin)
        block = (keys, v.unflatten(-1, (-1, self.head_dim)))
        past = (view.seen(view.context.keys[self.layer]), view.seen(view.context.values[self.layer]))
        return linear(_attend(queries, past, block, mask).to(x.dtype).flatten(2), self.out)

    def _heads(self, rows: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = rms_norm(rows.unflatten(-1, (-1, self.head_dim)), norm, self.eps)
        return apply_rope(heads, cos, sin, interleaved=False)


def _attend(queries: Tensor, past: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """Softmax attention of queries [S, b, H, d] over past keys and values [C, n, G, d] and a block's [S, b, G, d].

    With one context for all streams (C = 1) the streams become rows of one product, so that nothing is copied a stream.
    Sums are float32, or float64 for float64. Returns [S, b, H, d] in that dtype.
    """
    wide = compute_dtype(queries.dtype)
    num_streams, width, num_heads, head_dim = queries.shape
    num_contexts, num_past, kv_heads, _ = past[0].shape
    shape = (num_contexts, num_streams // num_contexts, width, kv_heads, num_heads // kv_heads, head_dim)
    q = (queries.to(wide) * head_dim**-0.5).view(shape).permute(0, 3, 1, 4, 2, 5).contiguous()  # [C, G, m, H/G, b, d]
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


class DraftLayer(nn.Module):
    """Attention and feed-forward, each on a normed copy of the residual stream; ranks add each of the two up once."""

    def __init__(
        self,
        config: DrafterConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        super().__init__()
        self.eps, self.ranks = config.rms_norm_eps, ranks
        self.input_norm = weight(config.hidden_size, dtype=dtype, device=device)
        self.attention = DraftAttention(config, layer, dtype=dtype, device=device, ranks=ranks)
        self.post_norm = weight(config.hidden_size, dtype=dtype, device=device)
        self.mlp = SwiGlu(config.hidden_size, config.intermediate_size, dtype=dtype, device=device, ranks=ranks)

    def views(self) -> dict[str, Part]:
        """Return the weights by checkpoint name."""
        norms = wholes(input_layernorm=self.input_norm, post_attention_layernorm=self.post_norm)
        return norms | prefixed("self_attn.", self.attention) | prefixed("mlp.", self.mlp)

    def forward(self, hidden: Tensor, view: BlockView, mask: Tensor) -> Tensor:
        """Return the residual stream [S, b, D] after this layer."""
        attended = self.attention(rms_norm(hidden, self.input_norm, self.eps), view, mask)
        hidden = hidden + self.ranks.all_reduce(attended, "drafter")
        return hidden + self.ranks.all_reduce(self.mlp(rms_norm(hidden, self.post_norm, self.eps)), "drafter")
