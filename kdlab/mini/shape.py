"""The mini's constants: Kimi K2.6's architecture, rope and format at a width that fits in 24 MB."""

from dataclasses import dataclass
from typing import Any

from kdlab.config import DrafterConfig, TargetConfig
from kdlab.mini.tokenizer import VOCAB_SIZE, special_ids

BLOCK_SIZES = (8, 16)
# Kimi K2.6's own rotary embedding, to the last constant.
_ROPE = {
    "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_THETA, _MAX_POSITIONS = 50000.0, 262144


@dataclass(frozen=True)
class Shape:
    """What differs between the mini and the tiny one that tests train."""

    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 8
    q_lora_rank: int = 64
    nope_dim: int = 16
    v_dim: int = 24
    dense_size: int = 512
    expert_size: int = 128
    num_experts: int = 24
    experts_per_token: int = 4
    draft_layers: int = 3
    draft_heads: int = 4
    draft_kv_heads: int = 2
    draft_head_dim: int = 64
    draft_size: int = 384
    taps: tuple[int, ...] = (1, 3, 5)
    vocab_size: int = VOCAB_SIZE


MINI = Shape()
SMOKE = Shape(
    hidden_size=64, num_layers=3, num_heads=2, q_lora_rank=32, dense_size=64, expert_size=32, num_experts=8,
    experts_per_token=2, draft_layers=1, draft_heads=2, draft_kv_heads=1, draft_head_dim=32, draft_size=64, taps=(0, 2),
    vocab_size=512,
)  # fmt: skip


def target_json(shape: Shape) -> dict[str, Any]:
    """Return the target's config.json, nested as Moonshot writes it."""
    ids = special_ids(shape.vocab_size)
    text: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "dtype": "bfloat16",
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_heads,
        "q_lora_rank": shape.q_lora_rank, "kv_lora_rank": 512, "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": 64, "v_head_dim": shape.v_dim, "intermediate_size": shape.dense_size,
        "moe_intermediate_size": shape.expert_size, "n_routed_experts": shape.num_experts, "n_shared_experts": 1,
        "num_experts_per_tok": shape.experts_per_token, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
        "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 2.827, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": _THETA,
        "rope_scaling": _ROPE, "max_position_embeddings": _MAX_POSITIONS, "attention_bias": False,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "bos_token_id": ids["[BOS]"],
        "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["[PAD]"], "quantization_config": _QUANTIZATION,
    }  # fmt: skip
    top = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16"}
    return top | {"tie_word_embeddings": False, "eos_token_id": ids["<|im_end|>"], "text_config": text}


_QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
               "re:.*lm_head.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
                "observer": "minmax", "dynamic": False, "actorder": None, "block_structure": None,
            },
        }
    },
}  # fmt: skip


def drafter_json(shape: Shape, block_size: int) -> dict[str, Any]:
    """Return a drafter's config.json as DFlash publishes it; the rope is K2.6's drafter's."""
    ids = special_ids(shape.vocab_size)
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16",
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "num_hidden_layers": shape.draft_layers,
        "num_attention_heads": shape.draft_heads, "num_key_value_heads": shape.draft_kv_heads,
        "head_dim": shape.draft_head_dim, "intermediate_size": shape.draft_size, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False,
        "max_position_embeddings": _MAX_POSITIONS, "rope_theta": _THETA,
        "rope_scaling": {key: value for key, value in _ROPE.items() if key != "type"} | {"rope_type": "deepseek_yarn"},
        "layer_types": ["full_attention"] * shape.draft_layers, "sliding_window": None, "use_sliding_window": False,
        "block_size": block_size, "num_target_layers": shape.num_layers,
        "dflash_config": {"mask_token_id": ids["[UNK]"], "target_layer_ids": list(shape.taps)},
    }  # fmt: skip


def target_config(shape: Shape) -> TargetConfig:
    """Return the target's constants as the model reads them."""
    return TargetConfig.from_dict(target_json(shape))


def drafter_config(shape: Shape, block_size: int) -> DrafterConfig:
    """Return a drafter's constants as the model reads them."""
    return DrafterConfig.from_dict(drafter_json(shape, block_size))
