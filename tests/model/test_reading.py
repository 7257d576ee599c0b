"""Reading: each rank its slices, little host memory, nothing allocated before every header is checked."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

import kdlab
from kdlab.errors import ArgumentError, CheckpointError, ConfigError, UnsupportedDevice
from kdlab.model import fit, pair, reading
from kdlab.model.checkpoint import Checkpoint, checkpoint_sha256
from kdlab.model.drafter import plan_drafter
from kdlab.model.layers import Part
from kdlab.model.ranks import Ranks
from kdlab.model.reading import Planned, check_parts, read_parts
from kdlab.model.target import load_target, plan_target
from kdlab.model.target_tensors import target_names
from tests.model.synthetics import INDEX, WIDE, damaged, shard_of, write_pair

EXPERT = "language_model.model.layers.2.mlp.experts.5.down_proj"
NORM = "language_model.model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("reading"), changes=WIDE)


def rank_parts(directory, rank, size, experts, *, packed=True):
    """The parts of one rank as a GPU holds them, read on the CPU; and the bytes that were read."""
    place = "cuda" if packed else "cpu"
    ranks = Ranks.slice_of(rank, size, experts)
    planned = plan_target(directory, device=place, dtype=torch.bfloat16, ranks=ranks)
    seen = []
    return planned.read("cpu", seen.append).views(), seen[-1].total_bytes


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize("packed", [True, False])
def test_the_slices_of_all_ranks_are_the_whole(folders, experts, packed):
    whole, all_bytes = rank_parts(folders[0], 0, 1, experts, packed=packed)
    pieces = [rank_parts(folders[0], rank, 4, experts, packed=packed) for rank in range(4)]
    for name, part in whole.items():
        found = torch.full_like(part.view, 77)
        for views, _ in pieces:
            assert views[name].shape == part.shape
            found[views[name].index] = views[name].view
        assert torch.equal(found, part.view), name
    assert all(nbytes < 0.5 * all_bytes for _, nbytes in pieces)
    replicated = sum(nbytes for _, nbytes in pieces) - all_bytes
    assert 0 < replicated < 3 * sum(p.view.nbytes for n, p in whole.items() if ".mlp.experts." not in n)


def test_a_slice_of_another_rank_is_not_the_whole(folders):
    """The broken twin of the test above: ranks that all read the first slice."""
    whole, _ = rank_parts(folders[0], 0, 1, "tp")
    first, _ = rank_parts(folders[0], 0, 4, "tp")
    other, _ = rank_parts(folders[0], 1, 4, "tp")
    name = EXPERT.removeprefix("language_model.") + ".weight_packed"
    assert not torch.equal(whole[name].view[other[name].index], first[name].view)


def test_everything_is_checked_before_the_first_byte_is_read(folders, tmp_path, monkeypatch):
    """A wrong drafter, or one of another target, is found while nothing has been made but empty modules."""
    places, new = [], Planned.read

    def read(self, device, progress=None):
        places.append(device)
        return new(self, device, progress)

    monkeypatch.setattr(Planned, "read", read)
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in folders[1].iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    (bad / "model.safetensors").write_bytes((folders[1] / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cut short"):
        kdlab.load_pair(folders[0], bad)
    config = json.loads((folders[1] / "config.json").read_text())
    (bad / "model.safetensors").write_bytes((folders[1] / "model.safetensors").read_bytes())
    (bad / "config.json").write_text(json.dumps(config | {"num_target_layers": 4}))
    with pytest.raises(ConfigError, match="num_target_layers"):
        kdlab.load_pair(folders[0], bad)
    broken = damaged(folders[0], tmp_path / "target", shard_of(folders[0], NORM), lambda tensors: tensors)
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer"):
        kdlab.load_pair(broken)
    monkeypatch.setattr(pair, "check_room", lambda nbytes, device: fit.check_room(nbytes, torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 10, 1 << 30))
    with pytest.raises(UnsupportedDevice, match=r"of free memory for the weights.*kdlab doctor --model"):
        kdlab.load_pair(*folders)
    assert places == []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    kdlab.load_pair(*folders)
    assert len(places) == 2


def test_a_model_that_the_host_cannot_hold_is_refused(folders, tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 7 kB\n")
    assert fit._available_bytes(tmp_path / "meminfo") == 7 << 10
    assert fit._available_bytes(tmp_path / "nothing") is None
    monkeypatch.setattr(fit, "_available_bytes", lambda: 7 << 10)
    with pytest.raises(UnsupportedDevice, match=r"cpu: expected .* GiB of free memory"):
        kdlab.load_pair(folders[0])
    monkeypatch.setattr(fit, "_available_bytes", lambda: None)
    kdlab.load_pair(folders[0])


def test_planned_bytes_are_those_of_the_weights(folders):
    for planned in (
        plan_target(folders[0], device="cpu", dtype=torch.float32),
        plan_drafter(folders[1], dtype=torch.float32),
    ):
        assert planned.nbytes == sum(weight.nbytes for weight in planned.read("cpu").parameters())
        assert all(weight.is_meta for weight in planned.empty.parameters())


def test_progress_counts_what_is_read(folders, monkeypatch):
    monkeypatch.setattr(reading, "_REPORT_BYTES", 10_000)
    seen = []
    load_target(folders[0], device="cpu", dtype=torch.float32, progress=seen.append)
    assert len(seen) > 5
    assert all(a.done_bytes <= b.done_bytes and a.seconds <= b.seconds for a, b in pairwise(seen))
    with Checkpoint(folders[0]) as checkpoint:
        names = [n for n in checkpoint.names if n.startswith("language_model.") and not n.endswith("_shape")]
        assert seen[-1].done_bytes == seen[-1].total_bytes == sum(checkpoint.stored(name).nbytes for name in names)
    assert seen[-1].bytes_per_s == pytest.approx(seen[-1].done_bytes / seen[-1].seconds)


def test_torch_reads_with_one_thread_and_then_has_its_own_again(folders, monkeypatch):
    monkeypatch.setattr(reading, "_REPORT_BYTES", 10_000)
    seen = []

    def stop(_):
        seen.append(torch.get_num_threads())
        if len(seen) == 2:
            raise InterruptedError

    torch.set_num_threads(2)
    try:
        with pytest.raises(InterruptedError):
            load_target(folders[0], device="cpu", dtype=torch.float32, progress=stop)
        assert seen == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_rows_are_read_in_steps(folders, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 100)
    ours, _ = rank_parts(folders[0], 1, 2, "tp")
    monkeypatch.undo()
    theirs, _ = rank_parts(folders[0], 1, 2, "tp")
    assert all(torch.equal(part.view, theirs[name].view) for name, part in ours.items())


def test_a_part_that_does_not_fit_its_view_is_an_error(folders):
    name = "norm.weight"
    with Checkpoint(folders[1]) as checkpoint:
        part = Part(torch.empty(5), (64,), (slice(0, 1),))
        check_parts({n: Part(torch.empty(0), checkpoint.stored(n).shape, ()) for n in checkpoint.names}, checkpoint,
                    {n: n for n in checkpoint.names})  # fmt: skip
        with pytest.raises(CheckpointError, match=r"norm.weight: part \[1\] does not fill \[5\]"):
            read_parts({name: part}, checkpoint, {name: name})


HOST_MEMORY = """
import json, sys
from pathlib import Path
import torch
from kdlab.model import shard
from kdlab.model.checkpoint import Checkpoint
from kdlab.model.layers import Part
from kdlab.model.reading import read_parts

def mib(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024

directory, keep = sys.argv[1], sys.argv[2] == "keep"
if keep:
    shard.Shard.drop = lambda self: None
with Checkpoint(directory) as checkpoint:
    column = torch.empty(1000, 512, dtype=torch.bfloat16)
    index = (slice(None), slice(512, 1024))
    parts = {name: Part(column, (1000, 16384), index) for name in checkpoint.names}
    before = mib("VmRSS:")
    read_parts(parts, checkpoint, {name: name for name in parts})
    grown = mib("VmHWM:") - before  # the peak of this process; ru_maxrss begins with the parent's
print(json.dumps({"grown_mib": grown}))
"""


def write_sparse(directory, counts, shape):
    """Write a file of zeros for each count of tensors; they take no room on the disk."""
    nbytes, index = 2 * shape[0] * shape[1], {}
    for number, count in enumerate(counts):
        ends = [(f"w{number}.{i}", [i * nbytes, (i + 1) * nbytes]) for i in range(count)]
        text = json.dumps({n: {"dtype": "BF16", "shape": shape, "data_offsets": end} for n, end in ends}).encode()
        index |= dict.fromkeys((name for name, _ in ends), f"{number}.safetensors")
        with (directory / f"{number}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + count * nbytes)
    (directory / INDEX).write_text(json.dumps({"weight_map": index}))


def test_host_memory_stays_small_whatever_is_read(tmp_path):
    """Parts of 500 MiB are read, 31 MiB a tensor: eight in one file, then eight files of one.

    Pages of the maps count, and are given back. Kept, they would all stay; what either half kept would be too much.
    """
    write_sparse(tmp_path, [8, *[1] * 8], (1000, 16384))
    grown = {}
    for mode in ("drop", "keep"):
        command = [sys.executable, "-c", HOST_MEMORY, str(tmp_path), mode]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        grown[mode] = json.loads(done.stdout)["grown_mib"]
    assert 0 < grown["drop"] < 160
    assert grown["keep"] > 400


def test_large_checkpoints_are_sampled_and_say_so(folders, tmp_path, monkeypatch):
    whole = checkpoint_sha256(folders[0])
    assert len(whole) == 64
    monkeypatch.setattr("kdlab.model.checkpoint.FULL_DIGEST_BYTES", 1000)
    sampled = checkpoint_sha256(folders[0])
    assert sampled.startswith("sampled:")
    assert len(sampled) == 8 + 64
    shard = shard_of(folders[0], NORM)
    copies = [
        damaged(folders[0], tmp_path / str(i), shard, change)
        for i, change in enumerate((lambda t: t, lambda t: t | {NORM: t[NORM].float()}))
    ]
    assert checkpoint_sha256(copies[1]) != checkpoint_sha256(copies[0])
    path = copies[0] / shard
    data = bytearray(path.read_bytes())
    before = checkpoint_sha256(copies[0])
    data[-1] ^= 1
    path.write_bytes(data)
    assert checkpoint_sha256(copies[0]) != before
    (copies[0] / "config.json").write_text("{}")
    assert checkpoint_sha256(copies[0]).startswith("sampled:")


def test_ranks_that_do_not_divide_the_model(folders):
    with pytest.raises(ArgumentError, match="ranks"):
        plan_target(folders[0], device="cpu", dtype=torch.float32, ranks=Ranks.slice_of(0, 3))


def test_names_are_those_of_the_model(folders):
    with Checkpoint(folders[0]) as checkpoint:
        names, skipped = target_names(checkpoint, 3)
        assert skipped.vision == 335
        assert names["lm_head.weight"] == "language_model.lm_head.weight"
        stored = load_file(folders[0] / shard_of(folders[0], NORM))[NORM]
        assert torch.equal(checkpoint.read(names["model.layers.1.input_layernorm.weight"]), stored)
