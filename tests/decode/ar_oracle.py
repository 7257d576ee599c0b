"""AR decoding written apart from kdlab: no cache, expanded attention, scalar Philox; slow, and only for tests."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file


class Oracle:
    """The target of a directory of plain float tensors, run over the whole sequence for every new token."""

    def __init__(self, directory: Path) -> None:
        self.w = load_file(directory / "model.safetensors")
        self.c = json.loads((directory / "config.json").read_text())
        rope, half = self.c["rope_parameters"], self.c["qk_rope_head_dim"] // 2
        theta, factor, window = rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"]
        turns = [half * math.log(window / (beta * 2 * math.pi)) / math.log(theta) for beta in (32, 1)]
        low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), 2 * half - 1)
        ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(half)]
        frequencies = [theta ** (-i / half) * (r / factor + 1 - r) for i, r in enumerate(ramp)]
        self.freq = torch.tensor(frequencies, dtype=torch.float64)
        self.scale = (self.c["qk_nope_head_dim"] + 2 * half) ** -0.5 * (0.1 * math.log(factor) + 1) ** 2

    def norm(self, x, name, eps=1e-5):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.w[f"model.{name}.weight"]

    def mlp(self, x, name):
        gate, up, down = (self.w[f"model.{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def rotate(self, x):
        angle = torch.arange(len(x)).double()[:, None] * self.freq
        turn = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
        turn = turn if x.dim() == 2 else turn[:, None]
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)

    def attention(self, x, name):
        n, heads = len(x), self.c["num_attention_heads"]
        nope, latent = self.c["qk_nope_head_dim"], self.c["kv_lora_rank"]
        proj = {p: self.w[f"model.{name}.{p}.weight"] for p in ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")}
        q = (self.norm(x @ proj["q_a_proj"].T, f"{name}.q_a_layernorm", 1e-6) @ proj["q_b_proj"].T).view(n, heads, -1)
        kv = x @ self.w[f"model.{name}.kv_a_proj_with_mqa.weight"].T
        up = self.norm(kv[:, :latent], f"{name}.kv_a_layernorm", 1e-6) @ proj["kv_b_proj"].T
        k, v = up.view(n, heads, -1).split([nope, self.c["v_head_dim"]], -1)
        scores = torch.einsum("ihd,jhd->hij", q[..., :nope], k)
        scores = scores + torch.einsum("ihd,jd->hij", self.rotate(q[..., nope:]), self.rotate(kv[:, latent:]))
        scores = (scores * self.scale).masked_fill(~torch.ones(n, n).tril().bool(), -math.inf)
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(n, -1) @ proj["o_proj"].T

    def experts(self, x, name):
        score = torch.sigmoid(x @ self.w[f"model.{name}.gate.weight"].T)
        biased = score + self.w[f"model.{name}.gate.e_score_correction_bias"]
        chosen = biased.topk(self.c["num_experts_per_tok"]).indices
        weight = score.gather(1, chosen)
        weight = weight / weight.sum(1, keepdim=True) * self.c["routed_scaling_factor"]
        rows = [sum(weight[i, j] * self.mlp(x[i], f"{name}.experts.{chosen[i, j]}") for j in range(chosen.shape[1]))
                for i in range(len(x))]  # fmt: skip
        return torch.stack(rows) + self.mlp(x, f"{name}.shared_experts")

    def last_logits(self, ids):
        x = self.w["model.embed_tokens.weight"][torch.tensor(ids)]
        for layer in range(self.c["num_hidden_layers"]):
            name = f"layers.{layer}"
            x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
            ffn = self.mlp if layer < self.c["first_k_dense_replace"] else self.experts
            x = x + ffn(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        return self.norm(x[-1], "norm") @ self.w["lm_head.weight"].T

    def decode(self, ids, num_tokens, *, temperature=0.0, top_p=1.0, seed=0, stream=0):
        ids = list(ids)
        for _ in range(num_tokens):
            ids.append(draw(self.last_logits(ids), temperature, top_p, seed, stream, len(ids)))
        return ids[-num_tokens:]


def draw(logits, temperature, top_p, seed, stream, position):
    """The token of one row, one candidate after the other."""
    if temperature == 0:
        return int(logits.argmax())
    probs = (logits.double() / temperature).softmax(0).tolist()
    best, mass, winner = -math.inf, 0.0, -1
    for token in sorted(range(len(probs)), key=lambda t: (-probs[t], t)):
        if mass >= top_p or probs[token] == 0:
            break
        mass += probs[token]
        uniform = (philox_words(token // 4, position, stream, seed)[token % 4] + 0.5) / 2**32
        score = math.log(probs[token]) - math.log(-math.log(uniform))
        if score > best:
            best, winner = score, token
    return winner


def philox_words(block, position, stream, seed):
    """Philox4x32-10 in plain integers."""
    c, k, low = [block, position, stream, 0], [seed % 2**32, seed >> 32], 2**32 - 1
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & low, (a >> 32) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c
