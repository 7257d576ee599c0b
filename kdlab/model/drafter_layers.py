"""One decoder layer of the DFlash drafter: its rows attend to the context and to each other."""

import torch
from torch import Tensor, nn

from kdlab.config import DrafterConfig
from kdlab.kernels.add_norm import add_norm
from kdlab.kernels.draft_attention import draft_attention
from kdlab.kernels.head_norm_rope import append_context, head_norm_rope
from kdlab.kernels.skinny_linear import skinny_linear, skinny_matmul
from kdlab.kernels.stage import stage
from kdlab.model.draft_context import DraftContext
from kdlab.model.layers import Part, SwiGlu, parts, prefixed, weight, wholes
from kdlab.model.ranks import ONE_RANK, Ranks


class DraftHeads(nn.Module):
    """What makes the queries, keys and values of all layers; a rank holds some heads.

    The weights are stacked by layer: keys and values of a context row pass no layer, so all of them are one product.
    """

    def __init__(
        self, config: DrafterConfig, *, dtype: torch.dtype, device: torch.device | str, ranks: Ranks = ONE_RANK
    ) -> None:
        super().__init__()
        self.config, self.head_dim, self.eps = config, config.head_dim, config.rms_norm_eps
        self.heads = ranks.span(config.num_attention_heads, name="the drafter's num_attention_heads")
        self.kv_heads = ranks.shared_span(config.num_key_value_heads, name="the drafter's num_key_value_heads")
        self.num_queries = (self.heads.stop - self.heads.start) * self.head_dim
        self.num_keys = (self.kv_heads.stop - self.kv_heads.start) * self.head_dim
        layers, rows = config.num_hidden_layers, self.num_queries + 2 * self.num_keys
        # Queries, keys and values of a block in one product; of the context the last two parts.
        self.qkv = weight(layers, rows, config.hidden_size, dtype=dtype, device=device)
        self.q_norm = weight(layers, self.head_dim, dtype=dtype, device=device)
        self.k_norm = weight(layers, self.head_dim, dtype=dtype, device=device)

    def views(self, layer: int) -> dict[str, Part]:
        """Return the weights of one layer by checkpoint name."""
        q, k, v = self.qkv[layer].split((self.num_queries, self.num_keys, self.num_keys))
        queries, keys = self.span(self.heads), self.span(self.kv_heads)
        width = self.config.num_attention_heads * self.head_dim
        kv_width = self.config.num_key_value_heads * self.head_dim
        found = parts(0, queries, width, q_proj=q) | parts(0, keys, kv_width, k_proj=k, v_proj=v)
        return found | wholes(q_norm=self.q_norm[layer], k_norm=self.k_norm[layer])

    def span(self, heads: slice) -> slice:
        """Return the rows of some heads."""
        return slice(heads.start * self.head_dim, heads.stop * self.head_dim)

    def extend(self, context: DraftContext, features: Tensor, start: Tensor, count: Tensor, ops: str) -> None:
        """Write keys and values of context features, which pass no norm of a layer, for all layers.

        Args:
            context: of S streams.
            features: [S * n, D] float.
            start, count: [S] i32, where the rows go and how many are real.
            ops: what the ops run as.
        """
        weights = self.qkv[:, self.num_queries :].mT
        rows = skinny_matmul(features.expand(len(weights), -1, -1), weights, impl=ops)
        heads = 2, self.num_keys // self.head_dim, self.head_dim
        k, v = rows.view(len(weights), len(start), -1, *heads).unbind(3)
        tables = (self.k_norm, context.cos, context.sin)
        append_context(k, v, *tables, context.keys, context.values, start, count, eps=self.eps, impl=ops)


class DraftAttention(nn.Module):
    """Grouped-query attention with normed, rotated queries and keys over [context ; block], by one layer of `stack`."""

    def __init__(
        self, config: DrafterConfig, layer: int, stack: DraftHeads, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config, self.layer, self.stack = config, layer, stack
        self.num_queries, self.num_keys, self.head_dim = stack.num_queries, stack.num_keys, stack.head_dim
        self.eps, self.window, self.causal = stack.eps, config.sliding[layer], config.causal[layer]
        self.out = weight(config.hidden_size, self.num_queries, dtype=dtype, device=device)

    @property
    def qkv(self) -> Tensor:
        """Weights [queries + 2 * keys, D] of queries, keys and values."""
        return self.stack.qkv[self.layer]

    @property
    def q_norm(self) -> Tensor:
        """Weight [d] of the queries' norm."""
        return self.stack.q_norm[self.layer]

    @property
    def k_norm(self) -> Tensor:
        """Weight [d] of the keys' norm."""
        return self.stack.k_norm[self.layer]

    def views(self) -> dict[str, Part]:
        """Return the weights by checkpoint name."""
        queries, width = self.stack.span(self.stack.heads), self.config.num_attention_heads * self.head_dim
        return self.stack.views(self.layer) | parts(1, queries, width, o_proj=self.out)

    def forward(self, x: Tensor, context: DraftContext, start: Tensor, ops: str) -> Tensor:
        """Return [S * b, D], this rank's summand: block rows x [S * b, D] attend from position start [S] i32 on."""
        heads, kv_heads = self.num_queries // self.head_dim, self.num_keys // self.head_dim
        with stage("draft layers"):
            rows = skinny_linear(x, self.qkv, impl=ops).view(len(start), -1, heads + 2 * kv_heads, self.head_dim)
        with stage("draft attention"):
            both, v = rows.split((heads + kv_heads, kv_heads), dim=2)
            tables = (self.q_norm, self.k_norm, context.cos, context.sin)
            rotated = head_norm_rope(both, *tables, start, num_queries=heads, eps=self.eps, impl=ops)
            q, k = rotated.split((heads, kv_heads), dim=2)
            past = context.keys[self.layer], context.values[self.layer]
            o = draft_attention(
                q, k, v, *past, start, window=self.window, causal=self.causal, past_is_old=True, impl=ops
            )
        with stage("draft layers"):
            return skinny_linear(o.reshape(len(x), -1), self.out, impl=ops)


class DraftLayer(nn.Module):
    """Attention and feed-forward, each on a normed copy of the residual stream; ranks add each of the two up once."""

    def __init__(
        self,
        config: DrafterConfig,
        layer: int,
        stack: DraftHeads,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        super().__init__()
        self.eps, self.ranks = config.rms_norm_eps, ranks
        self.input_norm = weight(config.hidden_size, dtype=dtype, device=device)
        self.attention = DraftAttention(config, layer, stack, dtype=dtype, device=device)
        self.post_norm = weight(config.hidden_size, dtype=dtype, device=device)
        self.mlp = SwiGlu(config.hidden_size, config.intermediate_size, dtype=dtype, device=device, ranks=ranks)

    def views(self) -> dict[str, Part]:
        """Return the weights by checkpoint name."""
        norms = wholes(input_layernorm=self.input_norm, post_attention_layernorm=self.post_norm)
        return norms | prefixed("self_attn.", self.attention) | prefixed("mlp.", self.mlp)

    def forward(
        self, x: Tensor, h: Tensor, context: DraftContext, start: Tensor, ops: str
    ) -> tuple[Tensor, Tensor]:
        """Run the layer, its ops as `ops` says, on the residual stream x [S * b, D] and its norm h by `input_norm`.

        Returns:
            The stream with the attention added, and what the feed-forward adds to that next: one launch adds and norms.
        """
        attended = self.attention(h, context, start, ops)
        with stage("draft layers"):
            x, h = add_norm(x, self.ranks.all_reduce(attended, "drafter"), self.post_norm, self.eps, impl=ops)
            return x, self.ranks.all_reduce(self.mlp(h, ops), "drafter")
