"""kimi-k26-mini as it ships: its shape and file format, its size, its experts bit for bit, and lossless decoding."""

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors import safe_open

import kdlab
from kdlab.mini.corpus import KINDS
from kdlab.model.moe import MixtureOfExperts
from kdlab.paths import BUNDLED_PAIRS, DATA

MODEL = DATA / "kimi-k26-mini"
TARGET = MODEL / "target"
ARGS = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
BLOCK_SIZES = {"bundled": 8, "bundled-b16": 16}


@pytest.fixture(scope="module")
def pairs():
    return {name: kdlab.load_pair(name) for name in BLOCK_SIZES}


def index():
    return json.loads((TARGET / "model.safetensors.index.json").read_text())["weight_map"]


def stored(name):
    with safe_open(TARGET / index()[name], "pt") as shard:
        return shard.get_tensor(name)


def routed(pair):
    return [layer.mlp for layer in pair.target.layers if isinstance(layer.mlp, MixtureOfExperts)]


def test_everything_fits_the_sizes():
    sizes = [path.stat().st_size for path in MODEL.rglob("*") if path.is_file()]
    assert sum(sizes) <= 24_000_000
    assert max(sizes) <= 16 * 2**20


def test_the_files_are_in_moonshots_format():
    names = index()
    assert len(set(names.values())) >= 3
    assert all((TARGET / shard).is_file() for shard in names.values())
    assert all(name.startswith("language_model.") for name in names)
    config = json.loads((TARGET / "config.json").read_text())
    assert config["text_config"]["quantization_config"]["format"] == "pack-quantized"
    assert not [name for name in names if ".mlp.experts." in name and name.endswith(".weight")]
    assert sum(name.endswith(".weight_packed") for name in names) == 3 * 24 * 5


def test_the_shape_is_that_of_kimi_k26(pairs):
    config = pairs["bundled"].target.config
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (512, 64)
    assert config.rope.factor == 64
    assert config.first_k_dense_replace == 1
    assert config.n_routed_experts >= 24
    assert config.num_experts_per_tok >= 4
    assert config.n_shared_experts == 1
    banks = routed(pairs["bundled"])
    assert len(banks) == config.num_hidden_layers - 1
    assert config.experts_int4
    assert all(bank.router.bias.abs().max() > 1e-3 for bank in banks)


@pytest.mark.parametrize("name", BLOCK_SIZES)
def test_names_lead_to_the_drafters(pairs, name):
    pair = pairs[name]
    assert pair.drafter.config.block_size == BLOCK_SIZES[name]
    assert pair.target_sha256 == pairs["bundled"].target_sha256
    assert BUNDLED_PAIRS[name][1].name == f"drafter-b{BLOCK_SIZES[name]}"


def test_an_expert_is_dequantised_as_compressed_tensors_does(pairs):
    bank = routed(pairs["bundled"])[2]
    gate_up, down = bank.routed.experts.matrices(7, torch.float32)
    parts = []
    for part in ("gate_proj", "up_proj", "down_proj"):
        prefix = f"language_model.model.layers.3.mlp.experts.7.{part}.weight"
        packed, scale, shape = (stored(f"{prefix}_{end}") for end in ("packed", "scale", "shape"))
        values = unpack_from_int32(packed, 4, torch.Size(shape.tolist()))
        parts.append(dequantize(values, scale.float(), args=ARGS, dtype=torch.float32))
    assert torch.equal(gate_up, torch.cat(parts[:2]))
    assert torch.equal(down, parts[2])
    assert not torch.equal(down, parts[2].roll(1, 0))


@pytest.mark.parametrize("name", BLOCK_SIZES)
def test_every_method_writes_the_text_of_ar(pairs, name):
    pair = pairs[name]
    prompts = [next(iter(kdlab.load_prompts(DATA / "prompts" / f"{kind}.jsonl"))) for kind in KINDS]
    options = dict(max_new_tokens=20)
    plain = kdlab.generate(pair, prompts, method="ar", **options)
    assert len({tuple(ids) for ids in plain.output_ids}) == len(KINDS)
    for method, budget in (("chain", pair.depth_limit), ("ddtree", 24)):
        run = kdlab.generate(pair, prompts, method=method, budget=budget, **options)
        assert run.output_ids == plain.output_ids
        assert sum(map(len, run.rounds)) < 0.7 * sum(map(len, plain.rounds))


def test_loss_on_held_out_text_is_near_that_on_training_text():
    losses = json.loads((MODEL / "training.json").read_text())["loss"]
    assert set(losses) == set(KINDS)
    assert all(loss["loss_held_out"] - loss["loss_training"] < 0.5 for loss in losses.values())


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_prompts_fit_the_tokenizer(pairs, kind):
    prompts = kdlab.load_prompts(DATA / "prompts" / f"{kind}.jsonl")
    assert len(prompts) >= 16
    assert {prompt.kind for prompt in prompts} == {kind}
    tokenizer = pairs["bundled"].tokenizer
    for prompt in prompts:
        assert tokenizer.decode(tokenizer.encode(prompt.text)) == prompt.text
