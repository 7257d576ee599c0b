"""add_norm: sums in torch's very bits, norms per row against float64."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels.add_norm import add_norm, add_norm_cost
from kdlab.kernels.reference import rms_norm
from tests.kernels.compare import assert_faults_are_found, assert_within_budget, guarded_allocations

gpu = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def new_case(rows, width, dtype, seed=0):
    """x and update of different sizes a row, and a weight around 1."""
    generator = torch.Generator().manual_seed(seed)
    scale = 0.01 + torch.rand(rows, 1, generator=generator)
    x, update = (torch.randn(rows, width, generator=generator) * scale for _ in range(2))
    return x.to(dtype), update.to(dtype), (1 + 0.3 * torch.randn(width, generator=generator)).to(dtype)


def assert_right(x, update, weight, total, out):
    """The sum has torch's bits, and the norm is that of the rounded sum."""
    assert torch.equal(total.cpu(), x if update is None else x + update)
    exact, plain = rms_norm(total.cpu().double(), weight.double(), EPS), rms_norm(total.cpu(), weight, EPS)
    assert_within_budget(out, exact, plain)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_auto_on_the_cpu_is_the_reference(dtype):
    x, update, weight = new_case(3, 24, dtype)
    total, out = add_norm(x, update, weight, EPS)
    assert torch.equal(total, x + update)
    assert torch.equal(out, rms_norm(x + update, weight, EPS))
    same, out = add_norm(x, None, weight, EPS)
    assert same is x
    assert torch.equal(out, rms_norm(x, weight, EPS))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(x=torch.zeros(3, 2, 24)), ShapeError, "x"),
        (dict(update=torch.zeros(2, 24)), ShapeError, "update"),
        (dict(weight=torch.zeros(23)), ShapeError, "weight"),
        (dict(weight=torch.zeros(24).half()), ShapeError, "weight: expected torch.float32 on cpu"),
        (dict(update=torch.zeros(3, 24, device="meta")), ShapeError, "update"),
        (dict(impl="fast"), ArgumentError, "impl"),
        (dict(impl="cuda"), UnsupportedDevice, "cpu"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change, error, message):
    good = dict(x=torch.zeros(3, 24), update=torch.zeros(3, 24), weight=torch.ones(24), eps=EPS)
    with pytest.raises(error, match=message):
        add_norm(**(good | change))


def test_fake_tensors():
    with FakeTensorMode():
        for width, dtype in ((24, torch.bfloat16), (8, torch.float32)):
            x, weight = (torch.empty(shape, dtype=dtype, device="cuda") for shape in ((3, width), (width,)))
            total, out = add_norm(x, x, weight, EPS, impl="cuda")
            assert total.shape == out.shape == (3, width)
            assert add_norm(x, None, weight, EPS, impl="cuda")[0] is x
        for width, dtype in ((20, torch.bfloat16), (24, torch.float64)):
            x, weight = (torch.empty(shape, dtype=dtype, device="cuda") for shape in ((3, width), (width,)))
            with pytest.raises(NotSupported):
                add_norm(x, None, weight, EPS, impl="cuda")


def test_cost():
    assert add_norm_cost(33, 7168).bytes == 2 * 7168 * (4 * 33 + 1)
    assert add_norm_cost(33, 1536, update=False).bytes == 2 * 1536 * (2 * 33 + 1)


@gpu
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("width", [8, 128, 1536, 7168, 7176, 20480])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_against_float64(dtype, width, rows):
    x, update, weight = new_case(rows, width, dtype)
    for change in (update, None):
        with guarded_allocations() as check:
            on_gpu = [None if t is None else t.cuda() for t in (x, change, weight)]
            total, out = add_norm(*on_gpu, EPS, impl="cuda")
            check()
        assert_right(x, change, weight, total, out)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_comparison_finds_faults(dtype):
    x, update, weight = new_case(33, 7168, dtype)
    total, out = (t.cpu() for t in add_norm(x.cuda(), update.cuda(), weight.cuda(), EPS))
    assert_faults_are_found(out, rms_norm(total.double(), weight.double(), EPS), rms_norm(total, weight, EPS))
    with pytest.raises(AssertionError):
        assert_right(x, update, weight, total, add_norm(x.cuda(), None, weight.cuda(), EPS)[1].cpu())


@gpu
def test_views_are_read_in_place():
    wide, update, weight = new_case(9, 2112, torch.bfloat16)
    _, out = add_norm(wide.cuda()[:, :1536], None, weight.cuda()[:1536], EPS, impl="cuda")
    assert_right(wide[:, :1536], None, weight[:1536], wide[:, :1536], out)
    total, out = add_norm(wide.cuda()[:, 512:], update.cuda()[:, :1600], weight.cuda()[512:], EPS, impl="cuda")
    assert_right(wide[:, 512:], update[:, :1600], weight[512:], total, out)


@gpu
def test_auto_takes_the_reference_where_the_kernel_does_not_run():
    for dtype, width in ((torch.float64, 24), (torch.bfloat16, 20)):
        x, update, weight = new_case(3, width, dtype)
        assert_right(x, update, weight, *add_norm(x.cuda(), update.cuda(), weight.cuda(), EPS))
    assert add_norm(*(t.cuda() for t in new_case(0, 64, torch.bfloat16)), EPS)[1].shape == (0, 64)


@gpu
def test_capture_replays_with_new_rows():
    x, update, weight = (t.cuda() for t in new_case(9, 7168, torch.bfloat16))
    add_norm(x, update, weight, EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, out = add_norm(*add_norm(x, update, weight, EPS), weight, EPS)
    for scale in (1.0, -2.0):
        x.mul_(scale)
        graph.replay()
        want = add_norm(*add_norm(x, update, weight, EPS), weight, EPS)
        assert torch.equal(total, want[0])
        assert torch.equal(out, want[1])


@gpu
def test_opcheck():
    x, update, weight = (t.cuda() for t in new_case(3, 64, torch.bfloat16))
    torch.library.opcheck(torch.ops.kdlab.add_norm.default, (x, update, weight, EPS))
    torch.library.opcheck(torch.ops.kdlab.norm.default, (x, weight, EPS))
