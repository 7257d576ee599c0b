"""Multi-head latent attention in absorbed form: the cache keeps one latent row a token, shared by all heads."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kdlab.config import TargetConfig
from kdlab.kernels.mla import Keys, attend, own_keys
from kdlab.kernels.reference import compute_dtype, rms_norm
from kdlab.kernels.rope import pair_tables, rope_tables, rotate
from kdlab.model.cache import LatentCache
from kdlab.model.layers import weight


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one forward prepares for the attention of all layers.

    `rope` holds the tables of `rotate` for T = S * N rows of one head, `places` [S, N] i64 says where the rows go in
    the cache (None without a cache).
    """

    rope: tuple[Tensor, Tensor]
    keys: Keys
    cache: LatentCache | None
    places: Tensor | None


def plan_attention(
    config: TargetConfig, positions: Tensor, cache: LatentCache | None, start: Tensor, mask: Tensor, dtype: torch.dtype
) -> AttentionPlan:
    """Prepare rope, keys and cache places of one forward; the arguments are those of `Target.forward`."""
    cos, sin = rope_tables(positions.flatten()[:, None], config.rope)
    rope = pair_tables(cos, sin, config.rope_interleave)
    heads = config.num_attention_heads
    if cache is None:
        return AttentionPlan(rope, own_keys(mask, num_heads=heads, dtype=compute_dtype(dtype)), None, None)
    return AttentionPlan(rope, cache.keys(start, mask, heads), cache, cache.places(start, mask.shape[1]))


class LatentAttention(nn.Module):
    """One layer's attention.

    W_UK and W_UV stay the two parts of kv_b [H, nope + v, C], which is the checkpoint's own layout: queries go through
    W_UK into the latent space, outputs come back through W_UV, and keys are never expanded.
    """

    def __init__(
        self, config: TargetConfig, layer: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads, nope, latent = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
        q_width = heads * (nope + config.qk_rope_head_dim)
        rank = config.q_lora_rank
        self.down_widths = [q_width if rank is None else rank, latent, config.qk_rope_head_dim]

        def new(*shape: int) -> nn.Parameter:
            return weight(*shape, dtype=dtype, device=device)

        self.qkv_a = new(sum(self.down_widths), config.hidden_size)
        self.q_norm = None if rank is None else new(rank)
        self.q_b = None if rank is None else new(q_width, rank)
        self.kv_norm = new(latent)
        self.kv_b = new(heads, nope + config.v_head_dim, latent)
        self.o = new(config.hidden_size, heads * config.v_head_dim)

    def views(self) -> dict[str, Tensor]:
        """Return the weights by checkpoint name."""
        q_down, kv_down = self.qkv_a.split([self.down_widths[0], sum(self.down_widths[1:])])
        found: dict[str, Tensor] = {
            "kv_a_proj_with_mqa.weight": kv_down,
            "kv_a_layernorm.weight": self.kv_norm,
            "kv_b_proj.weight": self.kv_b.flatten(0, 1),
            "o_proj.weight": self.o,
        }
        if self.q_b is None or self.q_norm is None:
            return found | {"q_proj.weight": q_down}
        return found | {
            "q_a_proj.weight": q_down,
            "q_a_layernorm.weight": self.q_norm,
            "q_b_proj.weight": self.q_b,
        }

    def forward(self, x: Tensor, plan: AttentionPlan) -> Tensor:
        """Attend rows x [T, D], already normed, T = S * N; their latent rows are written to the plan's cache.

        Returns:
            [T, D] in x's dtype.
        """
        config, latent_dim = self.config, self.config.kv_lora_rank
        key_up, value_up = self.kv_b.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        q_nope, q_rope, rows = self._project(x, plan)
        q_latent = torch.bmm(q_nope.transpose(0, 1), key_up).transpose(0, 1)
        q = torch.cat([q_latent, q_rope], dim=-1).unflatten(0, (plan.keys.bias.shape[0], -1))
        rows = rows.view(q.shape[0], q.shape[1], -1)
        if plan.cache is not None and plan.places is not None and plan.keys.rows is not None:
            plan.cache.write_at(self.layer, rows, plan.places)
            rows = plan.cache.read_at(self.layer, plan.keys.rows)
        o, _ = attend(q, rows, plan.keys, config.softmax_scale, latent_dim)
        heads = torch.bmm(o.flatten(0, 1).transpose(0, 1), value_up.transpose(1, 2))
        return F.linear(heads.transpose(0, 1).flatten(1), self.o)

    def _project(self, x: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Return q without rope [T, H, nope], rotated q [T, H, R] and the cache rows [T, C + R]."""
        config = self.config
        q, latent, k_rope = F.linear(x, self.qkv_a).split(self.down_widths, dim=-1)
        if self.q_b is not None and self.q_norm is not None:
            q = F.linear(rms_norm(q, self.q_norm, config.latent_norm_eps), self.q_b)
        q = q.unflatten(-1, (config.num_attention_heads, -1))
        q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        # The shared key rides along as one more head, so that one rotation serves both.
        both = rotate(torch.cat([q_rope, k_rope[:, None]], dim=1), plan.rope, config.rope_interleave)
        latent = rms_norm(latent, self.kv_norm, config.latent_norm_eps)
        return q_nope, both[:, :-1], torch.cat([latent, both[:, -1]], dim=-1)
