"""One checkpoint with all 64 shards and all 208,550 names of Kimi K2.6, at tiny widths: written, listed and loaded."""

import gc
import json
import re
from collections import Counter

import pytest
import torch
from safetensors import safe_open

import kdlab
from kdlab.config import TargetConfig
from kdlab.errors import CheckpointError
from kdlab.model.checkpoint import Checkpoint
from kdlab.model.fit import inspect_index
from tests.model.synthetics import INDEX, write_pair


@pytest.fixture(scope="module", autouse=True)
def no_collection():
    """A million small objects, none of them in a cycle: looking for cycles would take a third of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("full-names"), changes={})


def published_names():
    """The text decoder's names, as the published index has them, by rule."""
    names = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    attention = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    projections = ("gate_proj", "up_proj", "down_proj")
    for layer in range(61):
        inside = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        inside += [f"self_attn.{name}.weight" for name in attention]
        if layer == 0:
            inside += [f"mlp.{name}.weight" for name in projections]
        else:
            inside += ["mlp.gate.weight", "mlp.gate.e_score_correction_bias"]
            inside += [f"mlp.shared_experts.{name}.weight" for name in projections]
            inside += [
                f"mlp.experts.{expert}.{name}.weight_{kind}"
                for expert in range(384)
                for name in projections
                for kind in ("packed", "scale", "shape")
            ]
        names += [f"model.layers.{layer}.{name}" for name in inside]
    return {f"language_model.{name}" for name in names}


def test_every_published_name_in_its_shard(directories):
    index = json.loads((directories[0] / INDEX).read_text())["weight_map"]
    assert len(index) == 208_550
    vision = {name for name in index if name.startswith(("vision_tower.", "mm_projector."))}
    assert len(vision) == 335
    assert index.keys() - vision == published_names()
    assert len(set(index.values())) == 64
    for name, shard in index.items():
        layer = re.match(r"language_model\.model\.layers\.(\d+)\.", name)
        number = 1 + int(layer[1]) if layer else 63 + name.startswith("vision") if name in vision else 62
        assert shard == f"model-{number:05d}-of-000064.safetensors"
    with safe_open(directories[0] / "model-00061-of-000064.safetensors", "pt") as file:
        dtypes = Counter(file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
    assert dtypes == {"F32": 1, "I32": 2 * 3 * 384, "BF16": 2 + 7 + 1 + 3 + 3 * 384}


def test_the_whole_loads_and_decodes(directories):
    seen = []
    pair = kdlab.load_pair(*directories, progress=seen.append)
    assert (pair.target.skipped.vision, pair.target.skipped.mtp) == (335, 0)
    assert len(pair.target.layers) == 61
    last = seen[-2:]
    assert [report.what for report in last] == [str(directory) for directory in directories]
    assert all(report.done_bytes == report.total_bytes > 0 and report.bytes_per_s > 0 for report in last)
    run = kdlab.generate(pair, [[5, 6, 7]], budget=15, max_new_tokens=6)
    assert run.output_ids == kdlab.generate(pair, [[5, 6, 7]], method="ar", max_new_tokens=6).output_ids
    hidden = pair.target.head(pair.target.embed(torch.arange(8)[None]))
    assert hidden.isfinite().all()


def test_the_index_alone_says_that_it_is_whole(directories, tmp_path):
    for name in ("config.json", INDEX):
        (tmp_path / name).write_bytes((directories[0] / name).read_bytes())
    facts = inspect_index(tmp_path, TargetConfig.load(tmp_path))
    assert (facts["tensors"], facts["vision_tensors"], facts["files"], facts["files_here"]) == (208_550, 335, 64, 0)
    assert facts["problems"] == []


def test_a_missing_shard_is_named_with_a_tensor_of_it(directories):
    shard = directories[0] / "model-00017-of-000064.safetensors"
    away = shard.rename(directories[1] / "away")
    try:
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(directories[0])
    finally:
        away.rename(shard)
    tensor = "language_model.model.layers.16.input_layernorm.weight"
    assert str(caught.value).startswith(f"{shard}: expected a shard that {INDEX} names for {tensor}")
