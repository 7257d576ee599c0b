"""forward_rows: the kernel against plain torch, in torch's very bits, to the last position of the model."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.config import RopeConfig, TargetConfig
from kdlab.errors import ArgumentError, ShapeError, UnsupportedDevice
from kdlab.kernels.forward_rows import forward_rows, forward_rows_cost
from kdlab.kernels.rope import rope_tables
from kdlab.paths import K26_SHAPES
from tests.kernels.compare import guarded_allocations

gpu = pytest.mark.gpu
ROPE = TargetConfig.load(K26_SHAPES / "target").rope
LAST = 262_143


def new_case(streams=3, rows=33, tokens=torch.int32, positions=torch.int32, device="cpu"):
    """Streams with all rows, some, and none in use; tokens of unused rows are wild."""
    generator = torch.Generator().manual_seed(0)
    num_rows = torch.tensor([rows, rows // 2, 0], dtype=torch.int32)[:streams]
    ids = torch.randint(1, 163_840, (streams, rows), generator=generator).to(tokens)
    ids[torch.arange(rows) >= num_rows[:, None]] = -7
    places = torch.randint(0, LAST + 1, (streams, rows), generator=generator).to(positions)
    places[0, -1] = LAST
    return [tensor.to(device) for tensor in (ids, places, num_rows)]


def assert_same(found, expected):
    for name, ours, theirs in zip(expected._fields, found, expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


def test_the_reference_masks_and_turns():
    ids, places, num_rows = new_case()
    tokens, used, cos, sin = forward_rows(ids, places, num_rows, ROPE)
    assert used.sum(1).tolist() == num_rows.tolist()
    assert (tokens[~used] == 0).all()
    assert torch.equal(tokens[used], ids[used])
    assert torch.equal(torch.stack([cos, sin]), torch.stack(rope_tables(places, ROPE)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(tokens=torch.zeros(3, dtype=torch.int32)), ShapeError, "tokens"),
        (dict(tokens=torch.zeros(2, 4)), ShapeError, "tokens"),
        (dict(positions=torch.zeros(2, 3, dtype=torch.int32)), ShapeError, "positions"),
        (dict(num_rows=torch.zeros(3, dtype=torch.int32)), ShapeError, "num_rows"),
        (dict(num_rows=torch.zeros(2, dtype=torch.int32, device="meta")), ShapeError, "num_rows"),
        (dict(impl="fast"), ArgumentError, "impl"),
        (dict(impl="cuda"), UnsupportedDevice, "cpu"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change, error, message):
    rows = torch.zeros(2, 4, dtype=torch.int32)
    good = dict(tokens=rows, positions=rows, num_rows=torch.zeros(2, dtype=torch.int32), rope=ROPE)
    with pytest.raises(error, match=message):
        forward_rows(**(good | change))


def test_fake_tensors_and_cost():
    with FakeTensorMode():
        rows = torch.empty(2, 4, dtype=torch.int64, device="cuda")
        count = torch.empty(2, dtype=torch.int32, device="cuda")
        with pytest.raises(ShapeError, match="positions"):
            forward_rows(rows, rows.short(), count, ROPE, impl="cuda")
    assert forward_rows_cost(33, 64).bytes == 33 * (12 + 1 + 256) + 256


@gpu
@pytest.mark.parametrize("tokens", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("positions", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rows", [1, 33, 512])
def test_kernel_has_torchs_bits(rows, tokens, positions):
    case = new_case(3, rows, tokens, positions, "cuda")
    with guarded_allocations() as check:
        found = forward_rows(*case, ROPE, impl="cuda")
        check()
    assert_same(found, forward_rows(*case, ROPE, impl="reference"))


@gpu
def test_the_comparison_finds_faults_and_other_ropes_run():
    ids, places, num_rows = new_case(device="cuda")
    expected = forward_rows(ids, places, num_rows, ROPE, impl="reference")
    for broken in ((ids + 1, places, num_rows), (ids, places + 1, num_rows), (ids, places, num_rows - 1)):
        with pytest.raises(AssertionError):
            assert_same(forward_rows(*broken, ROPE), expected)
    for rope in (RopeConfig(dim=16, theta=1e4), RopeConfig(dim=256, theta=1e6, amplitude=1.4159)):
        found = forward_rows(ids, places, num_rows, rope)
        assert_same(found, forward_rows(ids, places, num_rows, rope, impl="reference"))
    assert forward_rows(ids[:0], places[:0], num_rows[:0], ROPE).cos.shape == (0, 33, 32)


@gpu
def test_opcheck():
    ids, places, num_rows = new_case(device="cuda")
    arguments = (ids, places, num_rows, torch.linspace(0, 1, 32, dtype=torch.float64, device="cuda"), 1.0)
    torch.library.opcheck(torch.ops.kdlab.forward_rows.default, arguments)
