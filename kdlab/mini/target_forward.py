"""The target's forward pass for training: expanded attention, all experts in one product, over `Target`'s own weights.

It gives `Target`'s logits at every position of whole sequences. A step over 64 x 1,024 tokens keeps the GPU busy only
if the experts are two large products, so all of them run and the router's weight is zero for those not chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from kdlab.config import TargetConfig
from kdlab.errors import ConfigError
from kdlab.kernels.reference import rms_norm
from kdlab.kernels.rope import apply_rope, rope_tables
from kdlab.mini.int4_training import fake_quantize
from kdlab.model.moe import DenseExpertBank, MixtureOfExperts
from kdlab.model.target import DecoderLayer, Target

Weights = dict[str, Tensor]
Block = Callable[[Tensor, Weights, TargetConfig, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


class Forward(NamedTuple):
    """What one pass over whole sequences gives."""

    hidden: Tensor  # [S, T, D] after the final norm
    taps: list[Tensor]  # [S, T, D] the residual stream after each tapped layer
    loads: list[Tensor]  # [E] f32 a MoE layer, rows that chose each expert


@dataclass(frozen=True)
class TargetForward:
    """Runs a `Target` over whole sequences.

    Attributes:
        target: in float32, dense experts.
        quantized: show the experts as INT4 will store them (training); False where they are read from a checkpoint.
        block: one layer, compiled or not.
    """

    target: Target
    quantized: bool
    block: Block

    def __call__(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        """Run tokens [S, T] int from position 0 on, under a lower triangle."""
        target = self.target
        cos, sin = rope_tables(torch.arange(tokens.shape[1], device=tokens.device), target.config.rope)
        x = F.embedding(tokens, target.embedding)
        tapped, loads = [], []
        for i, layer in enumerate(target.layers):
            x, load = self.block(x, layer_weights(layer), target.config, cos, sin, self.quantized)
            if i in taps:
                tapped.append(x)
            if load is not None:
                loads.append(load)
        return Forward(rms_norm(x, target.norm, target.config.rms_norm_eps), tapped, loads)


def layer_weights(layer: torch.nn.Module) -> Weights:
    """Return the parameters of one `DecoderLayer` by the names that `block` reads."""
    decoder = cast(DecoderLayer, layer)
    attention, mlp = decoder.attention, decoder.mlp
    found: dict[str, Tensor | None] = {
        "input_norm": decoder.input_norm, "post_norm": decoder.post_norm, "qkv_a": attention.qkv_a,
        "q_norm": attention.q_norm, "q_b": attention.q_b, "kv_norm": attention.kv_norm, "kv_b": attention.kv_b,
        "o": attention.o,
    }  # fmt: skip
    if not isinstance(mlp, MixtureOfExperts):
        return _given(found | {"gate_up": mlp.gate_up, "down": mlp.down})
    routed, shared = mlp.routed, mlp.shared
    if not isinstance(routed, DenseExpertBank) or shared is None:
        raise ConfigError("experts: expected dense routed experts and a shared one, got packed ones or none")
    found |= {"gate": mlp.router.gate, "bias": mlp.router.bias, "gate_up": shared.gate_up, "down": shared.down}
    return _given(found | {"experts_gate_up": routed.gate_up, "experts_down": routed.down})


def _given(weights: dict[str, Tensor | None]) -> Weights:
    absent = [name for name, weight in weights.items() if weight is None]
    if absent:
        raise ConfigError(f"q_lora_rank: expected a number, as this forward needs {', '.join(absent)}, got none")
    return cast(Weights, weights)


def block(
    x: Tensor, w: Weights, config: TargetConfig, cos: Tensor, sin: Tensor, quantized: bool
) -> tuple[Tensor, Tensor | None]:
    """Run one layer.

    Args:
        x: [S, T, D] float, the residual stream.
        w: of `layer_weights`.
        config: of the target.
        cos, sin: [T, R / 2] f32.
        quantized: read the experts as INT4 would hold them; gradients pass straight through.

    Returns:
        [S, T, D], and the load [E] f32 of a layer with experts: rows that chose each.
    """
    x = x + _attention(rms_norm(x, w["input_norm"], config.rms_norm_eps), w, config, cos, sin)
    h = rms_norm(x, w["post_norm"], config.rms_norm_eps)
    out = swiglu(h, w["gate_up"], w["down"])
    if "experts_gate_up" not in w:
        return x + out, None
    combine = route(h, w["gate"], w["bias"], config)
    gate_up, down = w["experts_gate_up"], w["experts_down"]
    if quantized:
        gate_up, down = fake_quantize(gate_up), fake_quantize(down)
    return x + out + all_experts(h, combine, gate_up, down), (combine > 0).float().sum((0, 1))


def swiglu(h: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return down(silu(gate h) * up h) of h [..., D]."""
    gate, up = F.linear(h, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def route(h: Tensor, gate: Tensor, bias: Tensor, config: TargetConfig) -> Tensor:
    """Weigh the experts of each row, in float32 like `Router`.

    Args:
        h: [..., D] float.
        gate: [E, D] float.
        bias: [E] f32, takes part in the choice alone.
        config: of the target.

    Returns:
        [..., E] f32, zero where an expert was not chosen.
    """
    with torch.autocast(h.device.type, enabled=False):
        scores = F.linear(h.float(), gate.float()).sigmoid()
        chosen = (scores + bias).topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(scores).scatter(-1, chosen, weights * config.routed_scaling_factor)


def all_experts(h: Tensor, combine: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Run rows through all E experts and add up what they give, each by its weight.

    Args:
        h: [..., D] float.
        combine: [..., E] f32, weights of `route`.
        gate_up: [E, 2 I, D] float, gate rows first.
        down: [E, D, I] float.

    Returns:
        [..., D].
    """
    gate, up = F.linear(h, gate_up.flatten(0, 1)).unflatten(-1, gate_up.shape[:2]).chunk(2, dim=-1)
    inner = F.silu(gate) * up * combine[..., None].to(gate.dtype)
    return F.linear(inner.flatten(-2), down.transpose(0, 1).flatten(1))


def _attention(h: Tensor, w: Weights, config: TargetConfig, cos: Tensor, sin: Tensor) -> Tensor:
    heads, nope, v_dim = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    widths = [w["q_norm"].shape[0], config.kv_lora_rank, config.qk_rope_head_dim]
    q, latent, k_rope = F.linear(h, w["qkv_a"]).split(widths, dim=-1)
    q = F.linear(rms_norm(q, w["q_norm"].to(q.dtype), config.latent_norm_eps), w["q_b"]).unflatten(-1, (heads, -1))
    latent = rms_norm(latent, w["kv_norm"].to(latent.dtype), config.latent_norm_eps)
    k_nope, v = F.linear(latent, w["kv_b"].flatten(0, 1)).unflatten(-1, (heads, -1)).split([nope, v_dim], dim=-1)
    rotated = apply_rope(
        torch.cat([q[..., nope:], k_rope[:, :, None]], dim=2), cos[:, None], sin[:, None], config.rope_interleave
    )
    q = torch.cat([q[..., :nope], rotated[:, :, :heads]], dim=-1)
    k = torch.cat([k_nope, rotated[:, :, heads:].expand(-1, -1, heads, -1)], dim=-1)
    # The fused kernel wants values as wide as keys.
    v = F.pad(v, (0, k.shape[-1] - v_dim))
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=config.softmax_scale
    )
    return F.linear(o.transpose(1, 2)[..., :v_dim].flatten(2), w["o"])
