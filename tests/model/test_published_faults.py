"""Damage to a checkpoint of the published form: each error names the shard and the tensor."""

import json

import pytest
import torch

from kdlab.errors import CheckpointError
from kdlab.model.checkpoint import Checkpoint
from kdlab.model.target import load_target, plan_target
from tests.model.synthetics import INDEX, WIDE, damaged, shard_of, write_pair

EXPERT = "language_model.model.layers.2.mlp.experts.5.down_proj"
NORM = "language_model.model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("faults"), changes=WIDE)


CHANGES = {
    "norm, shape": (NORM, lambda t: t[:-1].clone(), "expected shape [64], got [63]"),
    "norm, dtype": (NORM, lambda t: t.int(), "expected dtype"),
    "words, shape": (EXPERT + ".weight_packed", lambda t: t[:-1].clone(), "expected shape [64, 16], got [63, 16]"),
    "words, dtype": (EXPERT + ".weight_packed", lambda t: t.long(), "expected dtype torch.int32, got torch.int64"),
    "scale, shape": (EXPERT + ".weight_scale", lambda t: t[:, :-1].clone(), "expected shape [64, 4], got [64, 3]"),
    "scale, dtype": (EXPERT + ".weight_scale", lambda t: t.float(), "expected dtype torch.bfloat16"),
    "weight_shape, shape": (EXPERT + ".weight_shape", lambda t: t[:1].clone(), "expected shape [2], got [1]"),
    "weight_shape, dtype": (EXPERT + ".weight_shape", lambda t: t.short(), "expected dtype torch.int32 or torch.int64"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_wrong_header_is_found_before_memory_is_taken(case, folders, tmp_path):
    name, change, message = CHANGES[case]
    shard = shard_of(folders[0], name)
    damaged(folders[0], tmp_path, shard, lambda tensors: tensors | {name: change(tensors[name])})
    with pytest.raises(CheckpointError) as caught:
        plan_target(tmp_path, device="cuda", dtype=torch.bfloat16)
    assert f"{tmp_path / shard}: {name}: {message}" in str(caught.value)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_wrong_weight_shape_is_found_before_memory_is_taken(place, folders, tmp_path):
    name = EXPERT + ".weight_shape"
    shard = shard_of(folders[0], name)
    damaged(folders[0], tmp_path, shard, lambda tensors: tensors | {name: tensors[name].flip(0)})
    with pytest.raises(CheckpointError) as caught:
        plan_target(tmp_path, device=place, dtype=torch.bfloat16)
    assert f"{tmp_path / shard}: {name}: expected the integers [64, 128], got [128, 64]" in str(caught.value)


def test_int64_shapes_of_newer_compressed_tensors_are_read(folders, tmp_path):
    shard = shard_of(folders[0], NORM)
    damaged(folders[0], tmp_path, shard, lambda t: {n: x.long() if n.endswith("_shape") else x for n, x in t.items()})
    ours, theirs = (load_target(d, device="cpu", dtype=torch.float32).views() for d in (tmp_path, folders[0]))
    assert all(torch.equal(part.view, theirs[name].view) for name, part in ours.items())


def test_missing_and_unknown_tensors_are_named_with_their_shards(folders, tmp_path):
    shard = shard_of(folders[0], NORM)

    def change(tensors):
        del tensors[NORM]
        return tensors | {EXPERT + ".bias": torch.zeros(1)}

    damaged(folders[0], tmp_path, shard, change)
    with pytest.raises(CheckpointError) as caught:
        load_target(tmp_path, device="cpu", dtype=torch.float32)
    missing = f"missing tensors: {NORM.removeprefix('language_model.')} (others of its layer are in {shard})"
    assert f"{missing}; unknown tensors: {EXPERT}.bias in {shard}" in str(caught.value)


@pytest.mark.parametrize("name", ["language_model.lm_head.weight", "language_model.model.embed_tokens.weight"])
def test_a_missing_tensor_of_no_layer_is_named_with_the_shard_of_its_like(name, folders, tmp_path):
    shard = shard_of(folders[0], name)
    damaged(folders[0], tmp_path, shard, lambda tensors: {n: x for n, x in tensors.items() if n != name})
    with pytest.raises(CheckpointError) as caught:
        plan_target(tmp_path, device="cpu", dtype=torch.float32)
    plain = name.removeprefix("language_model.")
    assert str(caught.value) == f"{tmp_path}: missing tensors: {plain} (others outside the layers are in {shard})"


def with_header(path, change):
    """Write a shard again with another header, a text."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = change(data[8:end].decode().rstrip()).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


def test_a_tensor_twice_in_the_index_or_in_a_header_is_named(folders, tmp_path):
    shard = shard_of(folders[0], NORM)
    damaged(folders[0], tmp_path, shard, lambda tensors: tensors)
    index = (tmp_path / INDEX).read_text()
    twice = index.replace('"weight_map": {', f'"weight_map": {{"{NORM}": "{shard}", ')
    (tmp_path / INDEX).write_text(twice)
    with pytest.raises(CheckpointError, match=f"{INDEX}: .*{NORM} more than once"):
        Checkpoint(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with_header(tmp_path / shard, lambda text: text[:-1] + "," + json.dumps({NORM: json.loads(text)[NORM]})[1:])
    with pytest.raises(CheckpointError, match=f"{shard}: .*{NORM} more than once"):
        Checkpoint(tmp_path)


def test_a_tensor_past_the_end_of_its_file_is_named(folders, tmp_path):
    shard = shard_of(folders[0], NORM)
    damaged(folders[0], tmp_path, shard, lambda tensors: tensors)

    def moved(text):
        header = json.loads(text)
        header[NORM]["data_offsets"] = [offset + 2**40 for offset in header[NORM]["data_offsets"]]
        return json.dumps(header)

    with_header(tmp_path / shard, moved)
    with pytest.raises(CheckpointError, match=f"^{tmp_path / shard}: expected a whole .*{NORM} ends at .* cut short$"):
        Checkpoint(tmp_path)


def test_index_and_shards_that_disagree(folders, tmp_path):
    shard = shard_of(folders[0], NORM)
    damaged(folders[0], tmp_path, shard, lambda tensors: tensors)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"][NORM] = "model-00001-of-000006.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert f"{NORM} (index: model-00001-of-000006.safetensors; found: {shard})" in str(caught.value)
