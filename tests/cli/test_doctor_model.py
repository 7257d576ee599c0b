"""`kdlab doctor --model`: what a rank holds, how many ranks it takes, and what is wrong with the files."""

import json

import pytest

from kdlab import machine
from kdlab.cli import main
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.model.fit import WORKSPACE_BYTES, rank_bytes, rank_table, ranks_needed
from kdlab.model.ranks import Ranks
from kdlab.paths import K26_SHAPES
from tests.model.synthetics import INDEX, damaged, shard_of, write_pair

NORM = "language_model.model.layers.1.input_layernorm.weight"


@pytest.fixture
def doctor(capsys):
    """Run the verb; returns (status, the JSON document)."""

    def run(*arguments):
        status = main(["doctor", "--json", *map(str, arguments)])
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs of an H200's size, as torch would report them."""

    def have(count, gib=139.8):
        facts = {"gpu": "NVIDIA H200", "gpu_count": count, "gpu_memory_bytes": int(gib * 2**30)}
        monkeypatch.setattr(machine, "gpu_facts", lambda device=None: facts)

    return have


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("doctor"))


def test_kimi_k26_needs_eight_h200(doctor, gpus):
    models = ("--model", K26_SHAPES / "target", "--drafter", K26_SHAPES / "drafter")
    gpus(8)
    status, facts = doctor(*models)
    assert (status, facts["ranks_needed"], facts["fits"]) == (0, 8, True)
    assert facts["verdict"].startswith("fits here: 8 ranks")
    gpus(4)
    status, facts = doctor(*models)
    assert (status, facts["fits"]) == (1, False)
    assert facts["verdict"] == "needs 8 ranks of 139.8 GiB, one GPU each; here are 4 (NVIDIA H200)"
    by_ranks = {row["ranks"]: row for row in facts["ranks"]}
    # The published bytes of the text decoder, less the weight_shapes of 3 x 384 x 60 matrices.
    assert by_ranks[1]["weights"] == 594_205_904_896 - 8 * 69_120
    assert by_ranks[1]["cache"] == 70272 * 32768
    assert by_ranks[8]["cache"] == by_ranks[1]["cache"]
    assert 6.48 < by_ranks[1]["drafter"] / 2**30 < 6.49
    assert 8 * by_ranks[8]["draft_context"] == by_ranks[1]["draft_context"] == 24576 * (32768 + 1)
    for row in by_ranks.values():
        parts = ("weights", "cache", "drafter", "draft_context", "workspace")
        assert row["total"] == sum(row[part] for part in parts)


def test_context_and_streams_count(doctor, gpus):
    gpus(8)
    status, facts = doctor("--model", K26_SHAPES / "target", "--context", 262144, "--streams", 8)
    assert (status, facts["ranks_needed"]) == (1, None)
    assert "does not fit" in facts["verdict"]
    status, facts = doctor("--model", K26_SHAPES / "target", "--gpu-gib", 46)
    assert (status, facts["ranks_needed"]) == (1, 16)


def test_without_a_gpu_the_answer_is_for_the_published_one(doctor, gpus, monkeypatch):
    facts = {"gpu": None, "gpu_count": None, "gpu_memory_bytes": None}
    monkeypatch.setattr(machine, "gpu_facts", lambda device=None: facts)
    status, found = doctor("--model", K26_SHAPES / "target", "--experts", "ep")
    assert (status, found["ranks_needed"]) == (1, 8)
    assert found["verdict"].endswith("torch sees no GPU here")


def test_the_text_form(folders, capsys, gpus):
    gpus(1)
    assert main(["doctor", "--model", str(folders[0]), "--drafter", str(folders[1])]) == 0
    out = capsys.readouterr().out
    assert "files      6 of 6 here" in out
    assert "weights_gib" in out
    assert out.splitlines()[-1].startswith("verdict    fits here: 1 rank of")


def test_no_weight_is_read(folders, doctor, gpus, tmp_path):
    gpus(1)
    for name in ("config.json", INDEX):
        (tmp_path / name).write_bytes((folders[0] / name).read_bytes())
    status, facts = doctor("--model", tmp_path)
    assert (status, facts["files"], facts["files_here"], facts["problems"]) == (0, 6, 0, [])


def test_what_is_wrong_with_the_index_is_said(folders, doctor, gpus, tmp_path):
    gpus(1)
    for path in folders[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = tmp_path / shard_of(folders[0], NORM)
    shard.write_bytes(shard.read_bytes()[: 1 << 10])
    status, facts = doctor("--model", tmp_path)
    assert status == 1
    assert f"does not load: {shard}: expected a whole safetensors file" in facts["verdict"]
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["language_model.extra"] = index["weight_map"].pop(NORM)
    (tmp_path / INDEX).write_text(json.dumps(index))
    status, facts = doctor("--model", tmp_path)
    assert (status, facts["fits"]) == (1, False)
    plain = NORM.removeprefix("language_model.")
    assert f"the index lacks tensors, 1 in all: {plain}" in facts["verdict"]
    assert "the index has unknown tensors, 1 in all: extra" in facts["verdict"]


def test_a_tensor_of_a_wrong_shape_is_named_and_the_model_does_not_fit(folders, doctor, gpus, tmp_path):
    gpus(1)
    shard = shard_of(folders[0], NORM)
    damaged(folders[0], tmp_path, shard, lambda tensors: tensors | {NORM: tensors[NORM][1:].clone()})
    status, facts = doctor("--model", tmp_path)
    assert (status, facts["fits"]) == (1, False)
    assert facts["verdict"] == f"does not load: {tmp_path / shard}: {NORM}: expected shape [32], got [31]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nowhere"), "config.json"),
        (("--model", K26_SHAPES / "target", "--gpu-gib", "0"), "--gpu-gib"),
        (("--model", K26_SHAPES / "target", "--context", "0"), "context"),
        (("--model", K26_SHAPES / "target", "--streams", "0"), "streams"),
    ],
)
def test_bad_values_are_one_line(arguments, message, capsys):
    assert main(["doctor", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_every_rank_holds_as_much(experts):
    target, drafter = TargetConfig.load(K26_SHAPES / "target"), DrafterConfig.load(K26_SHAPES / "drafter")
    sizes = {rank_bytes(target, drafter, Ranks.slice_of(rank, 8, experts), context=64).total for rank in (0, 3, 7)}
    assert len(sizes) == 1


def test_fewest_ranks():
    target = TargetConfig.load(K26_SHAPES / "target")
    table = rank_table(target, None, context=64)
    assert [row.ranks for row in table] == [1, 2, 4, 8, 16, 32]
    assert all(row.workspace == WORKSPACE_BYTES for row in table)
    assert ranks_needed(table, table[2].total) == 4
    assert ranks_needed(table, table[2].total - 1) == 8
    assert ranks_needed(table, 0) is None
