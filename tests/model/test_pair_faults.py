"""Damaged directories and mistyped configs, given to `load_pair`: refused at once, with the file named."""

import json
import shutil
import time

import pytest

import kdlab
from kdlab.errors import CheckpointError, ConfigError, KdlabError
from kdlab.paths import DATA

PAIR = DATA / "tiny-pair"
HUGE = (2**31, 2**63, 10**12)


@pytest.fixture
def copies(tmp_path):
    """Both directories; weights are links."""
    for kind in ("target", "drafter"):
        shutil.copytree(PAIR / kind, tmp_path / kind, ignore=shutil.ignore_patterns("*.safetensors"))
        (tmp_path / kind / "model.safetensors").symlink_to(PAIR / kind / "model.safetensors")
    return tmp_path


def load(copies, kind="target", **changes):
    path = copies / kind / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        (config["rope_parameters"] if key.startswith("rope_") else config)[key] = value
    path.write_text(json.dumps(config))
    return kdlab.load_pair(copies / "target", copies / "drafter")


def test_links_to_files_load(copies):
    linked = kdlab.load_pair(copies / "target", copies / "drafter")
    assert linked.target_sha256 == kdlab.load_pair(PAIR / "target").target_sha256


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("target", "vocab_size"), ("target", "num_hidden_layers"), ("target", "kv_lora_rank"),
        ("target", "n_routed_experts"), ("drafter", "num_hidden_layers"), ("drafter", "block_size"),
        ("drafter", "num_attention_heads"), ("drafter", "intermediate_size"),
    ],
)  # fmt: skip
def test_huge_numbers_are_refused_before_they_take_memory(copies, kind, key, value):
    begin = time.perf_counter()
    with pytest.raises(ConfigError, match=f"{kind}/config.json: .*{key}: expected .*{value}"):
        load(copies, kind, **{key: value})
    assert time.perf_counter() - begin < 20


@pytest.mark.parametrize("key", ["vocab_size", "kv_lora_rank", "qk_nope_head_dim", "moe_intermediate_size"])
def test_a_weight_without_room_is_a_named_error(copies, key):
    with pytest.raises(KdlabError, match=r"weight \[.*\] torch.float32: expected room|expected shape|multiple"):
        load(copies, **{key: 2**31 - 2})


@pytest.mark.parametrize("theta", [1, 1.0, 0.5, 0, -1, float("nan"), float("inf")])
def test_a_rope_base_up_to_one_is_refused(copies, theta):
    with pytest.raises(ConfigError, match="rope_theta: expected a number above"):
        load(copies, rope_theta=theta)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_too_few_layers_in_the_config_are_not_taken_for_mtp(copies, layers):
    with pytest.raises(CheckpointError, match=f"unknown tensors: model.layers.{layers}"):
        load(copies, num_hidden_layers=layers)


@pytest.mark.parametrize("kind", ["target", "drafter"])
@pytest.mark.parametrize("text", ["", "{", "[]", "null", "5", "\ufeff{}", "{}", "[" * 100_000], ids=lambda t: t[:4])
def test_a_config_that_is_no_object_is_named_with_its_directory(copies, kind, text):
    (copies / kind / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{kind}/config.json: "):
        kdlab.load_pair(copies / "target", copies / "drafter")


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
@pytest.mark.parametrize("argument", ["target", "drafter"])
def test_a_name_that_no_path_can_be_is_refused(argument, name):
    with pytest.raises(KdlabError, match=f"^{argument}: expected a directory"):
        kdlab.load_pair(**{argument: name})
