"""Multi-head latent attention in absorbed form: the cache keeps one latent row a token, shared by all heads."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kdlab.config import TargetConfig
from kdlab.errors import UnsupportedDevice
from kdlab.kernels.add_norm import add_norm
from kdlab.kernels.forward_rows import forward_rows
from kdlab.kernels.jit import arch_of
from kdlab.kernels.mla import Keys, attend, compute_dtype, own_keys
from kdlab.kernels.norm_rope import DTYPES, norm_rope
from kdlab.kernels.reference import rms_norm
from kdlab.kernels.rope import pair_tables, rope_tables, rotate
from kdlab.kernels.skinny_linear import skinny_linear, skinny_matmul
from kdlab.kernels.stage import stage
from kdlab.kernels.verify_attention import choose_impl, verify_attention
from kdlab.model.cache import LatentCache
from kdlab.model.layers import Part, parts, weight, wholes
from kdlab.model.ranks import ONE_RANK, Ranks
from kdlab.model.visible_rows import VisibleRows


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one forward prepares for the attention of all layers, in plain torch.

    `rope` holds the tables of `rotate` for T = S * N rows of one head, `places` [S, N] i64 says where the rows go in
    the cache (None without a cache).
    """

    rope: tuple[Tensor, Tensor]
    keys: Keys
    cache: LatentCache | None
    places: Tensor | None
    tokens: Tensor  # [S, N] int, 0 in rows that are not in use

    used = None  # [T] bool, the rows in use: torch runs all of them
    ops = "reference"  # what the small ops run as

    @property
    def ran(self) -> str:
        """What the ops of the forward run as."""
        return "reference"


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The same for the CUDA ops: `norm_rope` writes the cache, `verify_attention` reads it."""

    impl: str  # of verify_attention
    cos: Tensor  # [S, N, R/2] f32
    sin: Tensor  # [S, N, R/2] f32
    cache: LatentCache
    prefix_len: Tensor  # [S] i32
    rows: VisibleRows
    tokens: Tensor  # [S, N] int, 0 in rows that are not in use
    used: Tensor  # [T] bool, the rows in use
    keys: Keys | None  # of torch's attention, where `impl` is "reference"

    ops = "auto"

    @property
    def ran(self) -> str:
        """What the ops of the forward run as: CUDA ops, and this attention."""
        return f"verify_attention={self.impl}"


def plan_attention(
    config: TargetConfig,
    tokens: Tensor,
    positions: Tensor,
    cache: LatentCache | None,
    start: Tensor,
    mask: Tensor | VisibleRows,
    dtype: torch.dtype,
    impl: str,
    *,
    num_heads: int,
) -> AttentionPlan | KernelPlan:
    """Prepare tokens, rope, keys and cache places of a forward with H heads on this rank; else as `Target.forward`."""
    kernel = _kernel(config, cache, dtype, impl)
    if kernel is not None and cache is not None:
        return _plan_kernels(config, tokens, positions, cache, start, mask, kernel, num_heads)
    tokens = torch.where(mask.used() if isinstance(mask, VisibleRows) else mask.any(-1), tokens, 0)
    mask = mask.mask() if isinstance(mask, VisibleRows) else mask
    cos, sin = rope_tables(positions.flatten()[:, None], config.rope)
    rope = pair_tables(cos, sin, config.rope_interleave)
    if cache is None:
        alone = own_keys(mask, num_heads=num_heads, dtype=compute_dtype(dtype))
        return AttentionPlan(rope, alone, None, None, tokens)
    return AttentionPlan(rope, cache.keys(start, mask, num_heads), cache, cache.places(start, mask.shape[1]), tokens)


def _kernel(config: TargetConfig, cache: LatentCache | None, dtype: torch.dtype, impl: str) -> str | None:
    """Return which verify_attention runs, or None where the whole forward is plain torch."""
    on_gpu = cache is not None and cache.pages.is_cuda
    if impl not in ("auto", "reference"):
        if not on_gpu:
            raise UnsupportedDevice(f"impl {impl!r} needs a latent cache on a CUDA GPU")
        return impl
    if impl == "reference" or cache is None or not on_gpu or dtype not in DTYPES:
        return None
    return choose_impl(arch_of(cache.pages.device), dtype, config.kv_lora_rank, config.qk_rope_head_dim)


def _plan_kernels(
    config: TargetConfig,
    tokens: Tensor,
    positions: Tensor,
    cache: LatentCache,
    start: Tensor,
    mask: Tensor | VisibleRows,
    impl: str,
    num_heads: int,
) -> KernelPlan:
    rows = mask if isinstance(mask, VisibleRows) else VisibleRows.from_mask(mask)
    tokens, used, cos, sin = forward_rows(tokens, positions, rows.num_rows, config.rope)
    keys = cache.keys(start, rows.mask(), num_heads) if impl == "reference" else None
    return KernelPlan(impl, cos, sin, cache, start.int(), rows, tokens, used.flatten(), keys)


class LatentAttention(nn.Module):
    """One layer's attention; a rank holds H of the heads, and all of what comes before them.

    W_UK and W_UV stay the two parts of kv_b [H, nope + v, C], which is the checkpoint's own layout: queries go through
    W_UK into the latent space, outputs come back through W_UV, and keys are never expanded.
    """

    def __init__(
        self,
        config: TargetConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.heads = ranks.span(config.num_attention_heads, name="num_attention_heads")
        heads, nope, latent = self.num_heads, config.qk_nope_head_dim, config.kv_lora_rank
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

    def views(self) -> dict[str, Part]:
        """Return the weights by checkpoint name."""
        config = self.config
        q_down, kv_down = self.qkv_a.split([self.down_widths[0], sum(self.down_widths[1:])])
        found = wholes(kv_a_proj_with_mqa=kv_down, kv_a_layernorm=self.kv_norm)
        found |= parts(0, *self._span(self.kv_b.shape[1]), kv_b_proj=self.kv_b.flatten(0, 1))
        found |= parts(1, *self._span(config.v_head_dim), o_proj=self.o)
        q_rows = self._span(config.qk_nope_head_dim + config.qk_rope_head_dim)
        if self.q_b is None or self.q_norm is None:
            return found | parts(0, *q_rows, q_proj=q_down)
        return found | wholes(q_a_proj=q_down, q_a_layernorm=self.q_norm) | parts(0, *q_rows, q_b_proj=self.q_b)

    @property
    def num_heads(self) -> int:
        """Heads H of this rank."""
        return self.heads.stop - self.heads.start

    def _span(self, width: int) -> tuple[slice, int]:
        """Return which rows or columns are this rank's, of all, where each head has `width` of them."""
        return slice(self.heads.start * width, self.heads.stop * width), self.config.num_attention_heads * width

    def forward(self, x: Tensor, plan: AttentionPlan | KernelPlan) -> Tensor:
        """Attend rows x [T, D], already normed, T = S * N; their latent rows are written to the plan's cache.

        Returns:
            [T, D] in x's dtype: this rank's summand.
        """
        key_up, value_up = self.kv_b.split([self.config.qk_nope_head_dim, self.config.v_head_dim], dim=1)
        if isinstance(plan, KernelPlan):
            o = self._attend_by_kernels(x, key_up, plan).flatten(0, 1)
            heads = o.new_empty(*o.shape[:2], value_up.shape[1])
            with stage("latent projections"):
                skinny_matmul(o.transpose(0, 1), value_up.mT, out=heads.transpose(0, 1), impl=plan.ops)
        else:
            o = self._attend_in_torch(x, key_up, plan).flatten(0, 1)
            with stage("latent projections"):
                heads = torch.bmm(o.transpose(0, 1), value_up.mT).transpose(0, 1)
        with stage("o_proj"):
            return skinny_linear(heads.flatten(1), self.o, impl=plan.ops)

    def _attend_in_torch(self, x: Tensor, key_up: Tensor, plan: AttentionPlan) -> Tensor:
        """Return o [S, N, H, C]; differentiable where there is no cache."""
        config, latent_dim = self.config, self.config.kv_lora_rank
        q_nope, q_rope, kv = self._project(x, plan.ops)
        with stage("norm_rope"):
            latent, k_rope = kv.split(self.down_widths[1:], dim=-1)
            # The shared key rides along as one more head, so that one rotation serves both.
            both = rotate(torch.cat([q_rope, k_rope[:, None]], dim=1), plan.rope, config.rope_interleave)
            latent = rms_norm(latent, self.kv_norm, config.latent_norm_eps)
        with stage("latent projections"):
            q_latent = torch.bmm(q_nope.transpose(0, 1), key_up).transpose(0, 1)
        with stage("attention"):
            q = torch.cat([q_latent, both[:, :-1]], dim=-1).unflatten(0, (plan.keys.bias.shape[0], -1))
            rows = torch.cat([latent, both[:, -1]], dim=-1).view(q.shape[0], q.shape[1], -1)
            if plan.cache is not None and plan.places is not None and plan.keys.rows is not None:
                plan.cache.write_at(self.layer, rows, plan.places)
                rows = plan.cache.read_at(self.layer, plan.keys.rows)
            return attend(q, rows, plan.keys, config.softmax_scale, latent_dim)[0]

    def _attend_by_kernels(self, x: Tensor, key_up: Tensor, plan: KernelPlan) -> Tensor:
        """Return o [S, N, H, C], 0 in rows that are not in use."""
        config, cache, pages = self.config, plan.cache, plan.cache.pages[self.layer]
        latent_dim, (streams, rows) = config.kv_lora_rank, plan.cos.shape[:2]
        q_nope, q_rope, kv = self._project(x, plan.ops)
        q = x.new_empty(streams, rows, self.num_heads, config.cache_width)
        with stage("latent projections"):
            into = q.flatten(0, 1)[..., :latent_dim].transpose(0, 1)
            skinny_matmul(q_nope.transpose(0, 1), key_up, out=into, impl=plan.ops)
        with stage("norm_rope"):
            norm_rope(
                kv.unflatten(0, (streams, rows)),
                q_rope.unflatten(0, (streams, rows)),
                self.kv_norm,
                *(plan.cos, plan.sin, pages, cache.block_table, plan.prefix_len, plan.rows.num_rows, q),
                eps=config.latent_norm_eps,
                interleaved=config.rope_interleave,
                inputs_are_old=True,  # W_UK is ahead
            )
        scale = config.softmax_scale
        with stage("attention"):
            if plan.keys is not None and plan.keys.rows is not None:
                q.masked_fill_(~plan.used.view(streams, rows, 1, 1), 0)
                return attend(q, cache.read_at(self.layer, plan.keys.rows), plan.keys, scale, latent_dim)[0]
            tree = (cache.block_table, plan.prefix_len, plan.rows.ancestors, plan.rows.num_rows)
            return verify_attention(q, pages, *tree, scale=scale, latent_dim=latent_dim, impl=plan.impl)[0]

    def _project(self, x: Tensor, ops: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return q without rope [T, H, nope], q to be rotated [T, H, R] and the raw cache rows [T, C + R], as views."""
        config = self.config
        with stage("q_a and kv_a"):
            q, kv = skinny_linear(x, self.qkv_a, impl=ops).split([self.down_widths[0], config.cache_width], dim=-1)
        if self.q_b is not None and self.q_norm is not None:
            with stage("norms"):
                _, q = add_norm(q, None, self.q_norm, config.latent_norm_eps, impl=ops)
            with stage("q_b"):
                q = skinny_linear(q, self.q_b, impl=ops)
        q = q.unflatten(-1, (self.num_heads, -1))
        q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        return q_nope, q_rope, kv
