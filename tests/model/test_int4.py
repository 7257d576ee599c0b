"""INT4 checkpoints: the loaded model is the one whose experts are value times scale."""

import pytest
import torch

from kdlab.config import TargetConfig
from kdlab.errors import CheckpointError
from kdlab.kernels.int4 import dequantize_int4, pack_int4
from kdlab.model.checkpoint import Checkpoint
from kdlab.model.moe import DenseExpertBank, PackedExpertBank
from kdlab.model.target import Target, load_target
from kdlab.model.target_tensors import load_tensors
from tests.model.targets import logits_of, reference_model, rewrite
from tests.test_config import INT4

EXPERT = "model.layers.1.mlp.experts.3.down_proj"
TOKENS = torch.arange(40)[None]


def is_expert(name):
    return ".mlp.experts." in name


def quantized(tensors):
    """Replace the experts by random INT4 words, scales and shapes, every value -8..7 among them."""
    generator = torch.Generator().manual_seed(0)
    out = {}
    for name, tensor in tensors.items():
        if not is_expert(name):
            out[name] = tensor
            continue
        rows, columns = tensor.shape
        values = torch.randint(-8, 8, (rows, columns), generator=generator)
        out[name + "_packed"] = pack_int4(values)
        out[name + "_scale"] = (torch.rand(rows, columns // 32, generator=generator) * 0.04 + 1e-3).bfloat16()
        out[name + "_shape"] = torch.tensor([rows, columns], dtype=torch.int32)
    return out


def dequantized(tensors):
    """The same experts as plain matrices."""
    packed, out = quantized(tensors), dict(tensors)
    for name in filter(is_expert, tensors):
        out[name] = dequantize_int4(packed[name + "_packed"], packed[name + "_scale"], torch.float32)
    return out


def int4_config(config):
    return config | {"quantization_config": INT4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    plain = tmp_path_factory.mktemp("plain")
    reference_model(hidden_size=64).save_pretrained(plain)
    packed, dense = tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("dense")
    rewrite(plain, packed, tensors=quantized, config=int4_config, shards=2)
    return plain, packed, rewrite(plain, dense, tensors=dequantized)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_int4_experts_load_bit_for_bit(folders, dtype):
    _, packed, dense = folders
    got, expected = (load_target(f, device="cpu", dtype=dtype).views() for f in (packed, dense))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name].view, expected[name].view) for name in got)


def packed_target(directory, dtype=torch.float32):
    """What `load_target` makes on a GPU, on the CPU."""
    config = TargetConfig.load(directory)
    target = Target(config, dtype=dtype, packed=True)
    with Checkpoint(directory) as checkpoint:
        load_tensors(target.views(), checkpoint, num_layers=config.num_hidden_layers, int4=True)
    return target


def test_packed_and_dequantised_experts_give_the_same_logits(folders):
    _, packed, _ = folders
    kept, opened = packed_target(packed), load_target(packed, device="cpu", dtype=torch.float32)
    assert isinstance(kept.layers[1].mlp.routed, PackedExpertBank)
    assert isinstance(opened.layers[1].mlp.routed, DenseExpertBank)
    assert kept.layers[1].mlp.routed.gate_up_packed.dtype == torch.int32
    assert torch.equal(logits_of(kept, TOKENS, [40]), logits_of(opened, TOKENS, [40]))


def test_scales_are_kept_bit_for_bit(folders, tmp_path):
    _, packed, _ = folders
    views = packed_target(packed).views()
    with Checkpoint(packed) as checkpoint:
        for name in (EXPERT + ".weight_scale", EXPERT + ".weight_packed"):
            assert torch.equal(views[name].view, checkpoint.read(name))


def test_quantisation_shows_in_the_logits(folders):
    plain, packed, _ = folders
    got, other = (logits_of(load_target(f, device="cpu", dtype=torch.float32), TOKENS, [40]) for f in (packed, plain))
    assert (got - other).abs().max() > 0.1


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("weight_shape", lambda t: t.flip(0), ".weight_shape: expected the integers [64, 32], got [32, 64]"),
        ("weight_shape", lambda t: t.float(), ".weight_shape: expected dtype torch.int32 or torch.int64"),
        ("weight_packed", lambda t: t.view(torch.uint8), ".weight_packed: expected"),
        ("weight_packed", lambda t: t[:, :-1].contiguous(), ".weight_packed: expected"),
        ("weight_scale", lambda t: t[:-1].contiguous(), ".weight_scale: expected"),
        ("weight_scale", lambda t: t.int(), ".weight_scale: expected"),
        ("weight_scale", None, "missing tensors: model.layers.1.mlp.experts.3.down_proj.weight_scale"),
        ("weight_zero_point", lambda _: torch.zeros(2), "unknown tensors: model.layers.1.mlp.experts.3.down_proj"),
        ("weight", lambda _: torch.zeros(64, 32), "unknown tensors: model.layers.1.mlp.experts.3.down_proj.weight"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_damaged_experts_are_named(suffix, change, message, packed, folders, tmp_path):
    name = f"{EXPERT}.{suffix}"

    def damage(tensors):
        found = quantized(tensors)
        old = found.pop(name, None)
        return found if change is None else found | {name: change(old)}

    rewrite(folders[0], tmp_path, tensors=damage, config=int4_config)
    with pytest.raises(CheckpointError) as caught:
        packed_target(tmp_path) if packed else load_target(tmp_path, device="cpu", dtype=torch.float32)
    assert message in str(caught.value)


def test_int4_tensors_without_a_quantization_config_are_unknown(folders, tmp_path):
    rewrite(folders[0], tmp_path, tensors=quantized)
    with pytest.raises(CheckpointError, match=r"missing tensors: .*weight.*unknown tensors: .*weight_packed"):
        load_target(tmp_path, device="cpu", dtype=torch.float32)


def test_a_quantised_attention_is_unknown(folders, tmp_path):
    name = "model.layers.0.self_attn.o_proj.weight_packed"
    rewrite(folders[0], tmp_path, tensors=lambda t: quantized(t) | {name: torch.zeros(1)}, config=int4_config)
    with pytest.raises(CheckpointError, match=f"unknown tensors: {name}"):
        load_target(tmp_path, device="cpu", dtype=torch.float32)
