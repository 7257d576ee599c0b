"""Configs: what is read, from where, and what is refused by name."""

import json
from pathlib import Path

import pytest

from kdlab.config import DrafterConfig, RopeConfig, TargetConfig
from kdlab.errors import ConfigError

PAIR = Path(__file__).parents[1] / "data" / "tiny-pair"
YARN_64 = {
    "type": "yarn",
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["re:.*lm_head.*"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": None,
                "dynamic": False,
                "observer": "minmax",
            },
        }
    },
}


def target(**changes):
    return json.loads((PAIR / "target" / "config.json").read_text()) | changes


def drafter(**changes):
    return json.loads((PAIR / "drafter" / "config.json").read_text()) | changes


def kimi():
    """The target's config as Kimi K2.6 lays it out: nested, rope_theta beside rope_scaling."""
    text = target(model_type="kimi_k2", rope_theta=50000.0, rope_scaling=YARN_64, quantization_config=INT4)
    del text["rope_parameters"]
    return {"model_type": "kimi_k25", "text_config": text | {"eos_token_id": 5}, "eos_token_id": [7, 5]}


def int4(path, value):
    """INT4 with the value at a dotted path changed."""
    changed = json.loads(json.dumps(INT4))
    *parents, last = path.split(".")
    inner = changed
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return changed


def test_tiny_target():
    config = TargetConfig.load(PAIR / "target")
    assert (config.num_hidden_layers, config.kv_lora_rank, config.cache_width) == (4, 512, 576)
    assert [config.is_moe_layer(layer) for layer in range(4)] == [False, True, True, True]
    assert not config.experts_int4
    assert config.latent_norm_eps == 1e-6


def test_kimi_layout():
    config = TargetConfig.from_dict(kimi(), latent_norm_eps=1e-5)
    assert config.rope.factor == 64
    assert config.rope.amplitude == 1.0
    assert config.experts_int4
    assert config.latent_norm_eps == 1e-5


def test_quantization_at_the_top_level_counts_too():
    values = kimi()
    values["quantization_config"] = values["text_config"].pop("quantization_config")
    assert TargetConfig.from_dict(values).experts_int4


@pytest.mark.parametrize(("factor", "all_dim", "scale"), [(64, 1.0, 0.14468), (32, 1.0, 0.13086), (64, 0.0, 0.0721688)])
def test_softmax_scale_of_the_facts(factor, all_dim, scale):
    rope = YARN_64 | {"factor": factor, "mscale_all_dim": all_dim}
    values = target(rope_parameters=rope | {"rope_theta": 5e4}, qk_nope_head_dim=128)
    assert TargetConfig.from_dict(values).softmax_scale == pytest.approx(scale, abs=5e-6)


@pytest.mark.parametrize(
    ("changes", "amplitude"),
    [
        ({}, 1.0),
        ({"mscale_all_dim": 0.0}, 1.4158883),
        ({"mscale": None, "mscale_all_dim": None}, 1.4158883),
        ({"mscale": None, "mscale_all_dim": None, "type": "deepseek_yarn"}, 1.4158883),
        ({"type": "deepseek_yarn"}, 1.0),
        ({"mscale": 0.5}, 1.2079442 / 1.4158883),
        ({"attention_factor": 1.25}, 1.25),
        ({"factor": 1.0, "mscale_all_dim": 0.0}, 1.0),
    ],
)
def test_rope_amplitude(changes, amplitude):
    rope = RopeConfig.from_dict({"rope_theta": 5e4, "rope_scaling": YARN_64 | changes}, 64)
    assert rope.amplitude == pytest.approx(amplitude, abs=1e-6)


def test_moe_layer_freq():
    config = TargetConfig.from_dict(target(moe_layer_freq=2, num_hidden_layers=6))
    assert [layer for layer in range(6) if config.is_moe_layer(layer)] == [2, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', got 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method: expected 'noaux_tc', got 'greedy'"),
        ({"model_type": "deepseek_v32"}, "model_type: expected 'deepseek_v3' or 'kimi_k2', got 'deepseek_v32'"),
        ({"num_key_value_heads": 1}, "num_key_value_heads: expected 4, got 1"),
        ({"hidden_size": None}, "hidden_size: expected an integer of at least 1, got 'null'"),
        ({"hidden_size": 0}, "hidden_size: expected an integer of at least 1, got 0"),
        ({"hidden_size": 128.0}, "hidden_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"norm_topk_prob": 1}, "norm_topk_prob: expected true or false, got 1"),
        ({"n_group": 3}, "n_group: expected a divisor of 8"),
        ({"n_group": 8, "topk_group": 2}, "n_group"),
        ({"topk_group": 2}, "topk_group: expected at most n_group 1, got 2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": 63}, "rope width: expected an even number, got 63"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type: expected 'default' or 'yarn'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"rope_parameters": YARN_64 | {"rope_theta": 5e4, "new_key": 1}}, "new_key: expected no such key"),
        ({"rope_parameters": YARN_64 | {"rope_theta": 5e4, "factor": None}}, "factor"),
        ({"rope_parameters": YARN_64 | {"rope_theta": 5e4, "factor": 0.5}}, "factor"),
        ({"rope_parameters": YARN_64 | {"rope_theta": 5e4, "type": None}}, "rope_type"),
        ({"rope_parameters": YARN_64 | {"rope_theta": 5e4, "rope_type": "default"}}, "type"),
        ({"rope_theta": 1e4}, "rope_theta"),
        ({"rope_scaling": YARN_64}, "expected rope_scaling's value"),
        ({"quantization_config": int4("format", "nvfp4-pack-quantized")}, "format: expected 'pack-quantized'"),
        ({"quantization_config": int4("config_groups.group_0.weights.num_bits", 8)}, "num_bits: expected 4, got 8"),
        ({"quantization_config": int4("config_groups.group_0.weights.symmetric", False)}, "symmetric"),
        ({"quantization_config": int4("config_groups.group_0.weights.group_size", 128)}, "group_size"),
        ({"quantization_config": int4("config_groups.group_0.weights.actorder", "group")}, "actorder"),
        ({"quantization_config": int4("config_groups.group_0.input_activations", {"num_bits": 8})},
         "input_activations: expected null, got {"),
        ({"quantization_config": INT4, "moe_intermediate_size": 80}, "moe_intermediate_size: expected a multiple of"),
        ({"quantization_config": int4("config_groups.group_1", {})}, "config_groups"),
        ({"quantization_config": INT4 | {"transform_config": {"config_groups": {}}}}, "transform_config: expected {}"),
        ({"quantization_config": INT4 | {"sparsity_config": {"format": "2:4"}}}, "sparsity_config: expected {}, got {"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method: expected 'compressed-tensors', got 'fp8'"),
    ],
)
def test_target_refusals_name_key_expected_and_got(changes, message):
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        TargetConfig.from_dict(target(**changes))
    assert message in str(caught.value)


def test_tiny_drafter():
    config = DrafterConfig.load(PAIR / "drafter")
    assert (config.block_size, config.depth_limit, config.mask_token_id) == (8, 7, 127)
    assert config.target_layer_ids == (0, 2)
    assert config.sliding == (None, None)
    assert config.causal == (False, False)
    assert config.rope.factor is None


@pytest.mark.parametrize(
    ("is_causal", "causal"), [(None, (True, False)), (False, (False, False)), (True, (True, True))]
)
def test_sliding_layers(is_causal, causal):
    types = ["sliding_attention", "full_attention"]
    config = DrafterConfig.from_dict(
        drafter(layer_types=types, use_sliding_window=True, sliding_window=16, is_causal=is_causal)
    )
    assert config.sliding == (16, None)
    assert config.causal == causal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": 127}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 127, "target_layer_ids": [0, 4]}}, "layers of the target, 0 to 3"),
        ({"dflash_config": {"mask_token_id": 127, "target_layer_ids": [-1, 0]}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 127, "target_layer_ids": []}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 128, "target_layer_ids": [0]}}, "mask_token_id"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0], "causal_head": True}}, "causal_head"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0], "block_size": 4}}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"block_size": None}, "block_size"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures"),
        ({"model_type": "llama"}, "model_type"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"layer_types": None, "use_sliding_window": True}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}, "sliding_window"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"output_multiplier": 2.0}, "output_multiplier"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_drafter_refusals_name_the_key(changes, message):
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        DrafterConfig.from_dict(drafter(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_unreadable_files_are_named(text, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: expected"):
        TargetConfig.load(tmp_path)
