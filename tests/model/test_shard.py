"""One safetensors file: headers that lie are refused with file and tensor, whole ones are read as safetensors does."""

import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kdlab.errors import CheckpointError
from kdlab.model.shard import Shard

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(4, dtype=torch.int64),
    "c": torch.tensor(1.5, dtype=torch.bfloat16),
    "d": torch.empty(0, 3),
    "e": torch.tensor([True, False]),
    "f": torch.arange(8).to(torch.float8_e4m3fn),
}


def write(path, header, data=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin=0, end=8, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_every_tensor_is_read_as_safetensors_does(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    shard = Shard(tmp_path / "x.safetensors")
    assert shard.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (shard.read(name).dtype, shard.read(name).shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(shard.read(name).float(), tensor.float())
    assert torch.equal(shard.read("a", (slice(1, 2), slice(0, 2))), TENSORS["a"][1:2, :2])


def test_what_is_written_into_a_view_does_not_reach_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    before = path.read_bytes()
    shard = Shard(path)
    shard.read("a").zero_()
    shard.touched(1 << 40)
    assert path.read_bytes() == before
    assert torch.equal(shard.read("b"), TENSORS["b"])


BROKEN = {
    "no bytes": (b"", "0 bytes"),
    "no header": (b"\0" * 7, "unknown length"),
    "header longer than the file": ((1000).to_bytes(8, "little") + b"{}", "a header of 1000"),
    "no JSON": (b"\x05" + b"\0" * 7 + b"{nope", "expected a whole safetensors file"),
    "deep JSON": ((200_000).to_bytes(8, "little") + b"[" * 200_000, "expected a whole safetensors file"),
    "a list": (b"\x02" + b"\0" * 7 + b"[]", "no JSON object"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_are_none(case, tmp_path):
    content, message = BROKEN[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as caught:
        Shard(path)
    assert message in str(caught.value)


HEADERS = {
    "cut short": ({"a": entry()}, 7, "a ends at"),
    "bytes too many": ({"a": entry()}, 9, "where its tensors end at"),
    "a hole": ({"a": entry(), "b": entry(9, 17)}, 17, "b: expected its bytes to begin at"),
    "an overlap": ({"a": entry(), "b": entry(4, 12)}, 12, "b: expected its bytes to begin at"),
    "size and shape differ": ({"a": entry(shape=(3,))}, 8, "a: expected 12 bytes of F32 [3], got [0, 8]"),
    "negative": ({"a": entry(-8, 0)}, 8, "a: expected 8 bytes"),
    "negative shape": ({"a": entry(shape=(-1, -2))}, 8, "a: expected 8 bytes"),
    "true is no number": ({"a": entry(0, 4, shape=(True,))}, 4, "a: expected 4 bytes"),
    "a fraction": ({"a": entry(shape=(2.0,))}, 8, "a: expected 8.0 bytes"),
    "unknown dtype": ({"a": entry(dtype="F4")}, 8, "a: expected dtype, shape and data_offsets"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8, "a: expected dtype, shape and data_offsets"),
    "three offsets": ({"a": entry() | {"data_offsets": [0, 8, 8]}}, 8, "a: expected dtype, shape and data_offsets"),
    "a text": ({"a": "tensor"}, 8, "a: expected dtype, shape and data_offsets"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_contradict_themselves_or_the_file(case, tmp_path):
    header, nbytes, message = HEADERS[case]
    path = write(tmp_path / "x.safetensors", header, bytes(nbytes))
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as caught:
        Shard(path)
    assert message in str(caught.value)
    with pytest.raises(SafetensorError), safe_open(path, "pt") as file:
        file.keys()
