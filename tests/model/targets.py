"""Random DeepseekV3 models as transformers builds them, written as Hugging Face directories, and ways to run ours."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from kdlab.model.cache import LatentCache
from kdlab.model.target import load_target

SMALL = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "intermediate_size": 40,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def yarn(factor, *, mscale=1.0, mscale_all_dim=1.0, theta=50000.0, original=32):
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": float(factor),
        "original_max_position_embeddings": original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


def reference_model(seed=0, **overrides):
    """A DeepseekV3ForCausalLM with weights large enough that every part shows in the logits."""
    config = DeepseekV3Config(**(SMALL | {"rope_parameters": yarn(8)} | overrides))
    config._attn_implementation = "eager"
    model = DeepseekV3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                value.copy_(1 + 0.3 * torch.randn(value.shape, generator=generator))
            elif "inv_freq" not in name:
                width = 0.3 if "bias" in name else value.shape[-1] ** -0.5
                value.copy_(width * torch.randn(value.shape, generator=generator))
    return model


def saved(model, directory, **load):
    """Write the reference model as a directory; return ours, loaded from it."""
    model.save_pretrained(directory)
    return load_target(directory, **({"device": "cpu", "dtype": torch.float32} | load))


def rewrite(source, target, *, tensors=None, config=None, shards=1):
    """Copy a one-file directory with its tensors and config changed, as one file or as an index with shards."""
    found = load_file(source / "model.safetensors")
    found = found if tensors is None else tensors(found)
    values = json.loads((source / "config.json").read_text())
    values = values if config is None else config(values)
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(values))
    if shards == 1:
        save_file(found, target / "model.safetensors")
        return target
    names, weight_map = sorted(found), {}
    for i in range(shards):
        part, file = names[i::shards], f"model-{i + 1:05d}-of-{shards:06d}.safetensors"
        save_file({name: found[name] for name in part}, target / file)
        weight_map |= dict.fromkeys(part, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def triangle(num_streams, num_rows):
    return torch.ones(num_streams, num_rows, num_rows).tril().bool()


def new_cache(target, num_streams=1, max_rows=256, *, poisoned=True):
    """A cache whose unwritten rows hold NaN, so that reading one shows."""
    dtype = target.embedding.dtype
    cache = LatentCache.allocate(target.config, num_streams, max_rows, dtype, "cpu")
    if poisoned:
        cache.pages.fill_(torch.nan)
    return cache


def prefill(target, cache, tokens, chunks, start=0, **options):
    """Run tokens [S, n] in chunks of these sizes; return the hidden states [S, n, D]."""
    hidden = []
    for size in chunks:
        part = tokens[:, :size]
        tokens = tokens[:, size:]
        streams = part.shape[0]
        positions = (start + torch.arange(part.shape[1])).expand(streams, -1)
        first = torch.full((streams,), start)
        out = target(part, positions, cache, first, triangle(streams, part.shape[1]), **options)
        hidden.append(out.hidden)
        start += part.shape[1]
    assert tokens.shape[1] == 0
    return torch.cat(hidden, dim=1) if hidden else None


def logits_of(target, tokens, chunks):
    with torch.no_grad():
        return target.head(prefill(target, new_cache(target, tokens.shape[0]), tokens, chunks))
