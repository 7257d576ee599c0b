"""Text that the target writes, thousands of streams at once: greedy or sampled, one document after the other.

A stream begins with the opening of a document; when the target ends that document, the opening of another follows.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kdlab.kernels.reference import rms_norm
from kdlab.kernels.rope import apply_rope, rope_tables
from kdlab.mini.batches import TokenStream
from kdlab.mini.int4_training import fake_quantize
from kdlab.mini.target_forward import Weights, all_experts, layer_weights, route, swiglu
from kdlab.model.target import Target


class Openings(NamedTuple):
    """Beginnings of documents for a target to go on from."""

    tokens: Tensor  # [P, n] i64
    lengths: Tensor  # [P] i64, 1..n


class Written(NamedTuple):
    """What the target wrote."""

    tokens: Tensor  # [S, T] i16
    own: Tensor  # [S, T] bool, the target drew this token; False in openings


def draw_openings(stream: TokenStream, count: int, shortest: int, longest: int, generator: torch.Generator) -> Openings:
    """Draw beginnings of documents; one never holds the end of its document.

    Args:
        stream: the documents.
        count: openings P.
        shortest, longest: tokens of an opening; half of its document where that is shorter.
        generator: of the draw, on the stream's device.
    """
    device = stream.tokens.device
    document = torch.randint(len(stream.starts), (count,), generator=generator, device=device)
    ends = torch.cat([stream.starts[1:], torch.tensor([len(stream.tokens)], device=device)]) - 1
    begin, room = stream.starts[document], ends[document] - stream.starts[document]
    wanted = torch.randint(shortest, longest + 1, (count,), generator=generator, device=device)
    lengths = torch.minimum(wanted, (room // 2).clamp_min(1))
    return Openings(stream.windows(begin, longest), lengths)


class Writer:
    """Decodes S streams side by side, a token a step, in absorbed form over one latent cache."""

    def __init__(self, target: Target, *, quantized: bool, dtype: torch.dtype) -> None:
        """Take the weights of `target` in `dtype`; `quantized` as in `TargetForward`."""
        self.config, self.dtype = target.config, dtype
        self.eps = target.config.rms_norm_eps
        self.layers = [_frozen(layer_weights(layer), quantized, dtype) for layer in target.layers]
        self.embedding, self.norm = target.embedding.detach().to(dtype), target.norm.detach().to(dtype)
        head = target.embedding if target.lm_head is None else target.lm_head
        self.head = head.detach().to(dtype)

    @torch.no_grad()
    def write(
        self, openings: Openings, temperature: Tensor, length: int, *, end: int, generator: torch.Generator
    ) -> Written:
        """Write `length` tokens in each stream.

        Args:
            openings: at least as many as there are streams; stream s begins with opening s.
            temperature: [S] float, 0 is greedy.
            end: the token that ends a document.
        """
        num_streams, device = len(temperature), temperature.device
        width = self.config.cache_width
        cache = [torch.empty(num_streams, length, width, dtype=self.dtype, device=device) for _ in self.layers]
        cos, sin = rope_tables(torch.arange(length, device=device), self.config.rope)
        which = torch.arange(num_streams, device=device)
        offset = torch.zeros_like(which)
        many = len(openings.lengths)
        token = openings.tokens[which, offset]
        tokens = torch.empty(num_streams, length, dtype=torch.int16, device=device)
        own = torch.zeros(num_streams, length, dtype=torch.bool, device=device)
        drawn = torch.zeros(num_streams, dtype=torch.bool, device=device)
        for t in range(length):
            tokens[:, t], own[:, t] = token.to(torch.int16), drawn
            logits = self._step(token, t, cache, cos[t], sin[t])
            noise = -torch.rand(logits.shape, generator=generator, device=device).clamp_min(1e-20).log()
            choice = (logits - temperature[:, None] * noise.clamp_min(1e-20).log()).argmax(-1)
            ended = token == end
            which = torch.where(ended, torch.randint(many, which.shape, generator=generator, device=device), which)
            offset = torch.where(ended, 0, offset + 1)
            drawn = offset >= openings.lengths[which]
            forced = openings.tokens[which, offset.clamp_max(openings.tokens.shape[1] - 1)]
            token = torch.where(drawn, choice, forced)
        return Written(tokens, own)

    def _step(self, token: Tensor, t: int, cache: list[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        """Run token [S] at position t; returns the logits [S, V] in float32."""
        x = F.embedding(token, self.embedding)
        for w, rows in zip(self.layers, cache, strict=True):
            x = x + self._attention(rms_norm(x, w["input_norm"], self.eps), w, rows, t, cos, sin)
            h = rms_norm(x, w["post_norm"], self.eps)
            out = swiglu(h, w["gate_up"], w["down"])
            if "experts_gate_up" in w:
                combine = route(h, w["gate"], w["bias"], self.config)
                out = out + all_experts(h, combine, w["experts_gate_up"], w["experts_down"])
            x = x + out
        return F.linear(rms_norm(x, self.norm, self.eps), self.head).float()

    def _attention(self, h: Tensor, w: Weights, rows: Tensor, t: int, cos: Tensor, sin: Tensor) -> Tensor:
        config = self.config
        heads, nope, latent_dim = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
        widths = [w["q_norm"].shape[0], latent_dim, config.qk_rope_head_dim]
        q, latent, k_rope = F.linear(h, w["qkv_a"]).split(widths, dim=-1)
        q = F.linear(rms_norm(q, w["q_norm"], config.latent_norm_eps), w["q_b"]).unflatten(-1, (heads, -1))
        turned = apply_rope(torch.cat([q[..., nope:], k_rope[:, None]], dim=1), cos, sin, config.rope_interleave)
        rows[:, t, :latent_dim] = rms_norm(latent, w["kv_norm"], config.latent_norm_eps)
        rows[:, t, latent_dim:] = turned[:, heads]
        key_up, value_up = w["kv_b"].split([nope, config.v_head_dim], dim=1)
        absorbed = torch.einsum("shn,hnc->shc", q[..., :nope], key_up)
        keys = rows[:, : t + 1]
        scores = torch.cat([absorbed, turned[:, :heads]], dim=-1) @ keys.transpose(1, 2)
        weights = (scores.float() * config.softmax_scale).softmax(-1).to(self.dtype)
        o = torch.einsum("shc,hvc->shv", weights @ keys[..., :latent_dim], value_up)
        return F.linear(o.flatten(1), w["o"])


def _frozen(weights: Weights, quantized: bool, dtype: torch.dtype) -> Weights:
    """Return one layer's weights as they will be stored; router and its bias stay in float32."""
    found = {}
    for name, value in weights.items():
        stored = fake_quantize(value) if quantized and name.startswith("experts_") else value
        found[name] = stored.detach().to(torch.float32 if name in ("gate", "bias") else dtype)
    return found
