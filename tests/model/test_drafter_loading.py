"""Which drafters load: configs and tensors of others are refused by name."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kdlab.config import DrafterConfig
from kdlab.errors import ArgumentError, CheckpointError, ConfigError
from kdlab.model.drafter import Drafter, load_drafter
from tests.model.drafters import SLIDING, TINY, YARN, tiny_config


def test_rope_is_the_drafters_own_and_its_amplitude_an_option():
    plain = DrafterConfig.from_dict(tiny_config(rope_parameters=None, rope_scaling=None, rope_theta=1e4))
    assert plain.rope == DrafterConfig.from_dict(tiny_config()).rope
    assert plain.rope.factor is None
    old_names = YARN | {"type": "deepseek_yarn"}
    del old_names["rope_type"], old_names["rope_theta"]
    deepseek = DrafterConfig.from_dict(tiny_config(rope_parameters=None, rope_scaling=old_names, rope_theta=5e4))
    assert deepseek.rope == DrafterConfig.from_dict(tiny_config(rope_parameters=YARN)).rope
    assert deepseek.rope.amplitude == 1.0
    assert Drafter(deepseek, rope_amplitude=1.4159).rope.amplitude == 1.4159
    with pytest.raises(ArgumentError, match="rope_amplitude"):
        Drafter(deepseek, rope_amplitude=0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": 127}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 127, "target_layer_ids": []}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 127, "target_layer_ids": [0, -1]}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 127, "target_layer_ids": [0, 4]}}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 128}}, "mask_token_id"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 127, "causal_head": True}}, "causal_head"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 127, "selector_rank": 8}}, "DFlash2"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 127, "novelty": 1}}, "novelty"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"causal_head": True}, "causal_head"),
        ({"conv_kernel_size": 2}, "DFlash2"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": [["full_attention"], 1]}, "layer_types"),
        ({"use_sliding_window": True, "layer_types": None}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": None}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type"),
        ({"is_causal": "yes"}, "is_causal"),
        ({"is_causal": True, "dflash_config": {"causal": False}}, "causal"),
        ({"block_size": None}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"output_multiplier": 2.0}, "output_multiplier"),
    ],
    ids=str,
)
def test_configs_of_other_drafters_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_dict(tiny_config(**changes))


def test_causality_may_stand_in_dflash_config():
    inner = {"mask_token_id": 127, "target_layer_ids": [0, 2], "causal": True, "causal_head": False}
    assert DrafterConfig.from_dict(tiny_config(dflash_config=inner)).causal == (True, True)
    assert DrafterConfig.from_dict(tiny_config()).causal == (False, False)
    assert DrafterConfig.from_dict(tiny_config(**SLIDING, sliding_window=7)).causal == (True, False)


@pytest.fixture
def directory(tmp_path):
    """A copy of the tiny drafter; call it with a function on the dict of tensors to rewrite them."""
    shutil.copy(TINY / "config.json", tmp_path)

    def write(change):
        tensors = load_file(TINY / "model.safetensors")
        changed = change(tensors)
        save_file(tensors if changed is None else changed, tmp_path / "model.safetensors")
        return tmp_path

    return write


def load(path):
    return load_drafter(path, device="cpu", dtype=torch.float32)


def test_a_common_prefix_is_accepted(directory):
    loaded = load(directory(lambda tensors: {"model." + name: tensor for name, tensor in tensors.items()}))
    torch.testing.assert_close(loaded.fc, load(TINY).fc, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: x for n, x in t.items() if n != "hidden_norm.weight"}, r"missing tensors: hidden_norm\.weight"),
        (lambda t: t.update({"lm_head.weight": torch.ones(1)}), r"unknown tensors: lm_head\.weight"),
        (lambda t: t.update({"fc.weight": torch.ones(128, 128)}), r"fc\.weight: expected shape \[128, 256\]"),
        (lambda t: t.update({"norm.weight": torch.ones(128, dtype=torch.int32)}), r"norm\.weight: expected dtype"),
        (lambda t: {("model." if "fc" in n else "") + n: x for n, x in t.items()}, r"missing tensors: fc\.weight"),
    ],
)
def test_wrong_tensors_are_named(directory, change, message):
    with pytest.raises(CheckpointError, match=message):
        load(directory(change))


def test_selector_tensors_are_refused(directory):
    extra = {"candidate_selector.hidden_projection.weight": torch.ones(1)}
    with pytest.raises(ConfigError, match=r"DFlash2.*candidate_selector"):
        load(directory(lambda tensors: tensors | extra))


def test_the_published_k26_drafter_has_this_many_tensors_and_values():
    published = {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 163840,
        "num_target_layers": 61,
        "layer_types": None,
        "dflash_config": {"target_layer_ids": [1, 12, 24, 35, 47, 58], "mask_token_id": 163838},
    }
    drafter = Drafter(DrafterConfig.from_dict(tiny_config(**published)), dtype=torch.bfloat16, device="meta")
    views = drafter.views()
    assert len(views) == 69
    assert sum(part.view.numel() for part in views.values()) == 3_479_277_056
    assert list(views["layers.5.self_attn.k_proj.weight"].shape) == [1024, 7168]
