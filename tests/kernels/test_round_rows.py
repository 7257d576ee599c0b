"""round_rows: roots, positions and rows in use as plain torch gives them."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, ShapeError, UnsupportedDevice
from kdlab.kernels.round_rows import round_rows
from tests.kernels.compare import guarded_allocations
from tests.kernels.test_target_sample import DEVICES, gpu


def new_case(streams, rows, device):
    generator = torch.Generator().manual_seed(0)

    def draw(high, *shape):
        return torch.randint(high, shape, generator=generator, dtype=torch.int32).to(device)

    running = torch.arange(streams, dtype=torch.int32, device=device) % 2
    numbers = dict(num_nodes=draw(rows + 1, streams), start=draw(262_144, streams), anchor=draw(163_840, streams))
    return dict(token=draw(100, streams, rows), depth=draw(31, streams, rows), **numbers, running=running)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("streams", "rows"), [(1, 1), (3, 33), (32, 128), (2, 129), (2, 1025), (0, 5)])
def test_rows_are_where_torch_puts_them(streams, rows, device):
    case = new_case(streams, rows, device)
    before, token = case["token"].clone(), case["token"]
    with guarded_allocations() as check:
        found = round_rows(**case)
    if device == "cuda":
        check()
    assert torch.equal(found.positions, case["start"][:, None] + case["depth"])
    assert torch.equal(found.behind, found.positions.long() + 1)
    assert torch.equal(found.num_rows, case["num_nodes"] * case["running"])
    assert torch.equal(token[:, 0], case["anchor"])
    assert torch.equal(token[:, 1:], before[:, 1:])
    if streams:
        assert not torch.equal(round_rows(**(case | dict(start=case["start"] + 1))).positions, found.positions)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(depth=torch.zeros(3, 4, dtype=torch.int32)), ShapeError, "depth"),
        (dict(start=torch.zeros(3)), ShapeError, "start: expected contiguous torch.int32"),
        (dict(running=torch.zeros(3, dtype=torch.bool)), ShapeError, "running"),
        (dict(anchor=torch.zeros(2, dtype=torch.int32)), ShapeError, "anchor"),
        (dict(token=torch.zeros(3, 0, dtype=torch.int32)), ShapeError, "token: expected at least the roots"),
        (dict(impl="cuda"), UnsupportedDevice, "cpu"),
        (dict(impl="fast"), ArgumentError, "impl"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change, error, message):
    case = new_case(3, 5, "cpu")
    before = case["token"].clone()
    with pytest.raises(error, match=message):
        round_rows(**(case | change))
    assert torch.equal(case["token"], before)


def test_fake_tensors():
    with FakeTensorMode():
        case = {name: torch.empty(value.shape, dtype=value.dtype, device="cuda")
                for name, value in new_case(3, 5, "cpu").items()}  # fmt: skip
        found = round_rows(**case, impl="cuda")
        assert (found.positions.dtype, found.behind.dtype) == (torch.int32, torch.int64)


@gpu
def test_op_is_registered_as_torch_wants_it():
    torch.library.opcheck(torch.ops.kdlab.round_rows.default, tuple(new_case(2, 33, "cuda").values()))
