"""pack_words: every field at its place, by its bits, as torch's cat puts them."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, ShapeError, UnsupportedDevice
from kdlab.kernels.pack_words import MAX_FIELDS, pack_words
from tests.kernels.compare import canary
from tests.kernels.test_target_sample import DEVICES, gpu


def new_fields(streams, rows, device):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator)

    fields = [draw(streams, rows).int(), draw(streams, rows).int().view(torch.float32), draw(streams) % 2 == 0]
    fields += [draw(streams), draw(streams, rows, 3).int().view(torch.uint32), draw(streams, 0).int(), draw(streams, 7)]
    return [field.to(device) for field in fields]


def expected(fields):
    parts = [
        field.view(torch.int32) if field.dtype in (torch.float32, torch.uint32) else field.int() for field in fields
    ]
    return torch.cat([part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts], dim=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("streams", "rows"), [(1, 1), (3, 33), (32, 129), (2, 1025), (0, 5)])
def test_fields_stand_side_by_side(streams, rows, device):
    fields = new_fields(streams, rows, device)
    want = expected(fields)
    out, check = canary(want.shape, torch.int32, device)
    pack_words(fields, out)
    check()
    assert torch.equal(out, want)
    if streams:
        swapped = torch.zeros_like(want)
        pack_words(fields[::-1], swapped)
        assert not torch.equal(swapped, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, MAX_FIELDS])
def test_as_many_fields_as_there_may_be(count, device):
    fields = [torch.full((2, 3), i, dtype=torch.int32, device=device) for i in range(count)]
    out = torch.zeros(2, 3 * count, dtype=torch.int32, device=device)
    pack_words(fields, out)
    assert torch.equal(out, expected(fields))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(out=torch.zeros(3, 6)), ShapeError, "out: expected contiguous torch.int32"),
        (dict(out=torch.zeros(3, 7, dtype=torch.int32)), ShapeError, r"\[3, 6\]"),
        (dict(fields=[torch.zeros(3, 6, dtype=torch.int16)]), ShapeError, r"fields\[0\]"),
        (dict(fields=[torch.zeros(6, 3, dtype=torch.int32).mT]), ShapeError, "strides"),
        (dict(fields=[torch.zeros(2, 6, dtype=torch.int32)]), ShapeError, r"\[3, ...\]"),
        (dict(fields=[None]), ShapeError, r"fields\[0\]: expected a tensor, got NoneType"),
        (dict(fields=[]), ArgumentError, "1 to 20"),
        (dict(fields=[torch.zeros(3, 0)] * 21), ArgumentError, "21"),
        (dict(impl="cuda"), UnsupportedDevice, "cpu"),
        (dict(impl="fast"), ArgumentError, "impl"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change, error, message):
    right = dict(fields=[torch.zeros(3, 6, dtype=torch.int32)], out=torch.zeros(3, 6, dtype=torch.int32))
    with pytest.raises(error, match=message):
        pack_words(**(right | change))


def test_fake_tensors():
    with FakeTensorMode():
        field, out = (torch.empty(3, 6, dtype=torch.int32, device="cuda") for _ in range(2))
        pack_words([field], out, impl="cuda")


@gpu
def test_op_is_registered_as_torch_wants_it():
    fields = [field.view(torch.int32) if field.element_size() == 4 else field for field in new_fields(2, 33, "cuda")]
    torch.library.opcheck(torch.ops.kdlab.pack_words.default, (fields, expected(fields)))
