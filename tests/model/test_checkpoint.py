"""Directories: every layout loads to the same model, every damaged one is refused by name."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from kdlab.errors import CheckpointError
from kdlab.model.checkpoint import Checkpoint, checkpoint_sha256
from kdlab.model.target import load_target
from tests.model.targets import reference_model, rewrite

NORM = "model.layers.1.input_layernorm.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    reference_model(seed=1).save_pretrained(directory)
    return directory


def load(directory):
    return load_target(directory, device="cpu", dtype=torch.float32)


def prefixed(tensors):
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


def with_vision_and_mtp(tensors):
    extra = {"vision_tower.blocks.0.weight", "vision_tower.norm", "mm_projector.0.weight"}
    mtp = {f"language_model.model.layers.3.{part}.weight" for part in ("eh_proj", "mlp.gate")}
    return prefixed(tensors) | {name: torch.zeros(2) for name in extra | mtp}


def nested(config):
    return {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": config}


def old_rope(config):
    rope = config.pop("rope_parameters")
    rope["type"] = rope.pop("rope_type")
    return config | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}


LAYOUTS = {
    "three-shards": {"shards": 3},
    "prefix": {"tensors": prefixed},
    "prefix-shards-nested": {"tensors": prefixed, "shards": 3, "config": nested},
    "old-rope": {"config": old_rope},
    "kimi": {"tensors": with_vision_and_mtp, "shards": 2, "config": lambda config: nested(old_rope(config))},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_load_to_the_same_model(layout, plain, tmp_path):
    expected, got = load(plain), load(rewrite(plain, tmp_path, **LAYOUTS[layout]))
    assert got.config == expected.config
    ours, theirs = got.views(), expected.views()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].view, theirs[name].view) for name in ours)
    assert (got.skipped.vision, got.skipped.mtp) == ((3, 2) if layout == "kimi" else (0, 0))


def test_exported_views_load_again(plain, tmp_path):
    views = load(plain).views()
    again = rewrite(plain, tmp_path, tensors=lambda _: {name: part.view.clone() for name, part in views.items()})
    assert all(torch.equal(part.view, views[name].view) for name, part in load(again).views().items())


def test_weights_are_stored_once(plain):
    target = load(plain)
    total = sum(parameter.numel() for parameter in target.parameters())
    assert total == sum(part.view.numel() for part in target.views().values())


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def changed(name, change):
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without(NORM), f"missing tensors: {NORM}"),
        (lambda t: t | {"model.layers.0.extra": torch.zeros(1)}, "unknown tensors: model.layers.0.extra"),
        (lambda t: t | {"vision_towers.x": torch.zeros(1)}, "unknown tensors: vision_towers.x"),
        (changed(NORM, lambda t: t[:-1]), f"{NORM}: expected shape [48], got [47]"),
        (changed(NORM, lambda t: t[None]), f"{NORM}: expected shape [48], got [1, 48]"),
        (changed(NORM, lambda t: t.long()), f"{NORM}: expected dtype"),
        (changed(NORM, lambda t: t.to(torch.float8_e4m3fn)), f"{NORM}: expected dtype"),
        (changed(BIAS, lambda t: t.bfloat16()), f"{BIAS}: expected dtype torch.float32"),
        (lambda t: t | {f"language_model.{NORM}": t[NORM].clone()}, "got both"),
    ],
)
def test_wrong_tensors_are_named(tensors, message, plain, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        load(rewrite(plain, tmp_path, tensors=tensors))
    assert message in str(caught.value)


def test_long_lists_are_counted(plain, tmp_path):
    with pytest.raises(CheckpointError, match=r"missing tensors: .* and \d+ more; unknown tensors: odd"):
        load(rewrite(plain, tmp_path, tensors=lambda _: {"odd": torch.zeros(1)}))


def shard(directory, number=2):
    return directory / f"model-{number:05d}-of-000003.safetensors"


def drop_shard(directory):
    shard(directory).unlink()


def truncate_shard(directory):
    shard(directory).write_bytes(shard(directory).read_bytes()[:-40])


def garble_shard(directory):
    shard(directory).write_bytes(b"not a safetensors file at all")


def edit_index(directory, change):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def wrong_shard_in_index(directory):
    edit_index(directory, lambda index: index["weight_map"].update({NORM: shard(directory, 1).name}))
    edit_index(directory, lambda index: index["weight_map"].update({BIAS: shard(directory, 3).name}))


def unlisted_tensor(directory):
    edit_index(directory, lambda index: index["weight_map"].pop(NORM))


def outside_the_directory(directory):
    edit_index(directory, lambda index: index["weight_map"].update({NORM: "../model.safetensors"}))


def no_weight_map(directory):
    edit_index(directory, lambda index: index.pop("weight_map"))


def both_kinds(directory):
    save_file({"x": torch.zeros(1)}, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_shard, "model-00002-of-000003.safetensors: expected a shard that model.safetensors.index.json names for"),
        (truncate_shard, "model-00002-of-000003.safetensors: expected a whole safetensors file"),
        (garble_shard, "model-00002-of-000003.safetensors: expected a whole safetensors file"),
        (wrong_shard_in_index, "index and shards disagree on"),
        (unlisted_tensor, NORM),
        (outside_the_directory, "weight_map"),
        (no_weight_map, "weight_map"),
        (both_kinds, "got both"),
    ],
)
def test_damaged_shards_are_named(damage, message, plain, tmp_path):
    directory = rewrite(plain, tmp_path, shards=3)
    damage(directory)
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert message in str(caught.value)


def test_only_safetensors(plain, tmp_path):
    shutil.copy(plain / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"only safetensors.*pytorch_model\.bin"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json and safetensors"):
        checkpoint_sha256(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint(tmp_path / "nowhere")


def test_sha256_depends_on_every_byte_and_not_on_where_it_lies(plain, tmp_path):
    copy = shutil.copytree(plain, tmp_path / "copy")
    before = checkpoint_sha256(plain)
    assert len(before) == 64
    assert checkpoint_sha256(copy) == before
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert checkpoint_sha256(copy) != before
    data[-1] ^= 1
    weights.write_bytes(data)
    (copy / "README.md").write_text("not part of the model")
    assert checkpoint_sha256(copy) == before
    (copy / "config.json").write_text("{}")
    assert checkpoint_sha256(copy) != before


def test_sha256_formula(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "b.safetensors").write_bytes(b"bb")
    (tmp_path / "a.safetensors").write_bytes(b"a")
    expected = hashlib.sha256(b"config.json\x002\x00{}a.safetensors\x001\x00ab.safetensors\x002\x00bb").hexdigest()
    assert checkpoint_sha256(tmp_path) == expected
