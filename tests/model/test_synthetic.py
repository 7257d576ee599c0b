"""The generator: what it writes is what safetensors and transformers read, at every scale and number of shards."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import kdlab
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError, ConfigError
from kdlab.kernels.int4 import unpack_int4
from kdlab.model.checkpoint import Checkpoint, checkpoint_sha256
from kdlab.model.synthetic import SCALES, drafter_json, main, target_json, write_target
from kdlab.model.synthetic_tensors import drafter_tensors, target_tensors, vision_tensors
from kdlab.model.target import load_target
from kdlab.paths import K26_SHAPES
from tests.model.synthetics import INDEX, SMALL, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("synthetic"))


def test_safetensors_reads_the_same(pair):
    for directory in pair:
        with Checkpoint(directory) as checkpoint:
            for path in sorted(directory.glob("*.safetensors")):
                for name, tensor in load_file(path).items():
                    ours = checkpoint.read(name)
                    assert ours.dtype == tensor.dtype
                    assert torch.equal(ours, tensor)
                    assert checkpoint.where(name) == f"{path}: {name}"


def test_the_index_says_where_everything_is_and_how_much(pair):
    index = json.loads((pair[0] / INDEX).read_text())
    files = sorted(path.name for path in pair[0].glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-000006.safetensors" for i in range(1, 7)]
    found, size = {}, 0
    for file in files:
        tensors = load_file(pair[0] / file)
        found |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    assert index == {"metadata": {"total_size": size}, "weight_map": found}


@pytest.mark.parametrize("shards", [1, 4, 6])
def test_any_number_of_shards_loads_to_equal_shapes(shards, pair, tmp_path):
    write_target(tmp_path, shards=shards, changes=SMALL)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == shards
    ours, theirs = (load_target(d, device="cpu", dtype=torch.float32).views() for d in (tmp_path, pair[0]))
    assert {name: part.shape for name, part in ours.items()} == {name: part.shape for name, part in theirs.items()}


def test_the_seed_decides_the_values(pair, tmp_path):
    for i, seed in enumerate((0, 0, 1)):
        write_target(tmp_path / str(i), changes=SMALL, seed=seed)
    digests = [checkpoint_sha256(tmp_path / str(i)) for i in range(3)]
    assert digests[0] == digests[1] == checkpoint_sha256(pair[0])
    assert digests[2] != digests[0]


def test_experts_hold_every_value_and_are_as_large_as_other_matrices(tmp_path):
    write_target(tmp_path, changes=SMALL | {"hidden_size": 256, "moe_intermediate_size": 64})
    with Checkpoint(tmp_path) as checkpoint:
        words = checkpoint.read("language_model.model.layers.1.mlp.experts.0.up_proj.weight_packed")
        values = unpack_int4(words).unique()
    assert values.tolist() == list(range(-8, 8))
    views = load_target(tmp_path, device="cpu", dtype=torch.float32).views()
    for kind, fan_in in (("experts.0.up_proj", 256), ("experts.0.down_proj", 64), ("shared_experts.up_proj", 256)):
        deviation = views[f"model.layers.1.mlp.{kind}.weight"].view.std()
        assert abs(deviation * fan_in**0.5 - 1) < 0.1, kind


def test_what_it_writes_decodes(pair):
    loaded = kdlab.load_pair(*pair)
    tree, plain = (kdlab.generate(loaded, [[1, 2, 3]], method=m, max_new_tokens=12) for m in ("ddtree", "ar"))
    assert tree.output_ids == plain.output_ids
    hidden = loaded.target.embed(torch.tensor([[1, 2, 3]]))
    assert loaded.target.head(hidden).isfinite().all()


def test_the_drafter_has_the_published_names(pair):
    with safe_open(pair[1] / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 69
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_refusals(pair, tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match="empty directory"):
        write_target(pair[0], changes=SMALL)
    with pytest.raises(ArgumentError, match="shards: expected at most 6, got 7"):
        write_target(tmp_path / "a", changes=SMALL, shards=7)
    with pytest.raises(ArgumentError, match="scale"):
        write_target(tmp_path / "a", scale="huge")
    with pytest.raises(ConfigError, match="moe_intermediate_size"):
        write_target(tmp_path / "a", changes=SMALL | {"moe_intermediate_size": 33})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ArgumentError, match="a disk with"):
        write_target(tmp_path / "a", changes=SMALL)
    assert list(tmp_path.glob("a/*")) == []


def test_the_command_line(tmp_path, capsys):
    options = ["--layers", "2", "--experts", "8", "--shards", "2", "--seed", "3"]
    assert main([str(tmp_path / "t"), *options, "--drafter", str(tmp_path / "d")]) == 0
    assert len(list((tmp_path / "t").glob("*.safetensors"))) == 2
    assert DrafterConfig.load(tmp_path / "d").num_target_layers == 2
    assert main([str(tmp_path / "t")]) == 2
    assert "empty directory" in capsys.readouterr().err


def test_a_full_scale_config_is_the_published_one():
    target = target_json("full", {})
    drafter = drafter_json(target["text_config"], "full", {})
    assert TargetConfig.from_dict(target) == TargetConfig.load(K26_SHAPES / "target")
    assert DrafterConfig.from_dict(drafter) == DrafterConfig.load(K26_SHAPES / "drafter")


def test_full_scale_tensors_are_those_of_kimi_k26():
    vision = vision_tensors(SCALES["full"].vision, 7168)
    assert [len(group) for group in vision] == [6, 329]
    groups = target_tensors(TargetConfig.load(K26_SHAPES / "target"))
    tensors = {tensor.name: tensor for group in groups for tensor in group}
    assert len(tensors) == 208_215
    assert sum(tensor.nbytes for tensor in tensors.values()) == 594_205_904_896
    drafter = drafter_tensors(DrafterConfig.load(K26_SHAPES / "drafter"))
    assert (len(drafter), sum(tensor.nbytes for tensor in drafter)) == (69, 2 * 3_479_277_056)
    layer = {tensor.name.split("layers.7.")[1]: (tensor.dtype, list(tensor.shape)) for tensor in groups[7]}
    assert layer.items() >= {
        "self_attn.q_b_proj.weight": ("BF16", [12288, 1536]),
        "self_attn.kv_a_proj_with_mqa.weight": ("BF16", [576, 7168]),
        "mlp.gate.e_score_correction_bias": ("F32", [384]),
        "mlp.experts.383.down_proj.weight_packed": ("I32", [7168, 256]),
        "mlp.experts.383.down_proj.weight_scale": ("BF16", [7168, 64]),
        "mlp.experts.383.down_proj.weight_shape": ("I32", [2]),
        "mlp.shared_experts.up_proj.weight": ("BF16", [2048, 7168]),
    }.items()
