"""router: the reference's choice wherever no near-tie decides, weights against float64."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import jit
from kdlab.kernels.router import _router_choose, router, router_cost
from kdlab.kernels.router_gate import MAX_ROWS, ROWS, gate_parts, has_gate, router_gate
from kdlab.kernels.skinny_linear import MAX_ROWS as SKINNY_ROWS
from tests.kernels.compare import assert_faults_are_found, assert_within_budget

gpu = pytest.mark.gpu
SCALE = 2.827


def new_case(rows, experts=384, width=7168, dtype=torch.bfloat16, seed=0):
    """x, weight and a bias that changes choices."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    weight = (torch.randn(experts, width, generator=generator) * width**-0.5).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return x, weight, 0.1 * torch.randn(experts, generator=generator, dtype=wide)


def clear_case(rows, k, **options):
    """A case whose rows choose by margins far above float32's rounding: rows with near-ties are drawn again."""
    x, weight, bias = new_case(4 * rows + 8, **options)
    choice = torch.nn.functional.linear(x.double(), weight.double()).sigmoid() + bias
    margin = -choice.sort(descending=True).values[:, : k + 1].diff(dim=1).amax(dim=1)
    kept = (margin > 1e-6).nonzero().flatten()[:rows]
    assert len(kept) == rows
    return x[kept], weight, bias


def exact_router(x, weight, bias, k, **options):
    return router(x.double(), weight.double(), bias.double(), k, SCALE, impl="reference", **options)


def plain_router(x, weight, bias, k, **options):
    """The reference in float32; for more rows than the kernel takes on products as cuBLAS's tensor cores add them."""
    if len(x) <= SKINNY_ROWS:
        return router(x, weight, bias, k, SCALE, impl="reference", **options)
    logits = torch.mm(x.cuda(), weight.cuda().mT, out_dtype=torch.float32).cpu()
    return router(logits, torch.eye(len(weight)), bias, k, SCALE, impl="reference", **options)


def assert_right(case, k, got, **options):
    """Ids are those of float64, in its order; the weights are within the budget of float32."""
    ids, weights = exact_router(*case, k, **options)
    assert torch.equal(got[0].cpu(), ids)
    assert_within_budget(got[1].cpu(), weights, plain_router(*case, k, **options)[1], "weights")


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_reference_against_ten_lines(dtype, normalize):
    x, weight, bias = new_case(5, 16, 24, dtype)
    used = torch.tensor([True, True, False, True, True])
    ids, weights = router(x, weight, bias, 3, SCALE, normalize=normalize, used=used)
    scores = (x.to(bias.dtype) @ weight.to(bias.dtype).T).sigmoid()
    for row in range(5):
        ranked = sorted(range(16), key=lambda e, row=row: (-(scores[row, e] + bias[e]).item(), e))[:3]
        assert ids[row].tolist() == (ranked if used[row] else [-1] * 3)
        chosen = scores[row, ranked]
        wanted = chosen / chosen.sum() if normalize else chosen
        torch.testing.assert_close(weights[row], wanted * SCALE * used[row])
    other = router(x, weight, bias + 3.0 * (torch.arange(16) == 9), 3, SCALE)[0]
    assert (other[:, 0] == 9).all()  # the bias changes the choice ...
    alone = router(x, weight, bias + 3.0 * (torch.arange(16) == 9), 1, 1.0, normalize=False)[1]
    torch.testing.assert_close(alone[:, 0], scores[:, 9])  # ... and not the weights' formula


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(x=torch.zeros(3, 23)), ShapeError, "weight"),
        (dict(bias=torch.zeros(9)), ShapeError, "bias"),
        (dict(bias=torch.zeros(8).bfloat16()), ShapeError, "bias: expected torch.float32 on cpu"),
        (dict(weight=torch.zeros(8, 24).half()), ShapeError, "weight: expected torch.float32 on cpu"),
        (dict(weight=torch.zeros(8, 24, device="meta")), ShapeError, "weight: expected torch.float32 on cpu"),
        (dict(groups=(3, 1)), ArgumentError, "groups"),
        (dict(groups=(2, 0)), ArgumentError, "groups"),
        (dict(groups=(8, 4)), ArgumentError, "groups"),
        (dict(used=torch.ones(2, dtype=torch.bool)), ShapeError, "used"),
        (dict(used=torch.ones(3, dtype=torch.int32)), ShapeError, "used: expected bool on cpu, as x, got torch.int32"),
        (dict(used=torch.ones(3, dtype=torch.bool, device="meta")), ShapeError, "used: expected bool on cpu"),
        (dict(k=0), ArgumentError, "k"),
        (dict(k=9), ArgumentError, "k"),
        (dict(impl="fast"), ArgumentError, "impl"),
        (dict(impl="cuda"), UnsupportedDevice, "cpu"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change, error, message):
    good = dict(x=torch.zeros(3, 24), weight=torch.zeros(8, 24), bias=torch.zeros(8), k=2, scale=1.0)
    with pytest.raises(error, match=message):
        router(**(good | change))


def test_fake_tensors():
    with FakeTensorMode():
        x, weight = (torch.empty(n, 256, dtype=torch.bfloat16, device="cuda") for n in (3, 384))
        bias = torch.empty(384, device="cuda")
        ids, weights = router(x, weight, bias, 8, SCALE, impl="cuda")
        assert (ids.shape, ids.dtype, weights.shape, weights.dtype) == ((3, 8), torch.int32, (3, 8), torch.float32)
        with pytest.raises(NotSupported, match="router"):
            router(x, weight, bias, 33, SCALE, impl="cuda")


def test_cost():
    cost = router_cost(33, 7168, 384, 8)
    assert cost.bytes == 2 * 7168 * (384 + 33) + 4 * 384 + 8 * 8 * 33
    assert cost.flops == 2 * 33 * 384 * 7168


def test_the_gate_runs_where_rows_lie_as_its_copies_want_them(monkeypatch):
    monkeypatch.setattr(jit, "arch_of", lambda device: "sm_90a")
    x, weight, _ = new_case(33, 384, 896)
    assert has_gate(x, weight)
    assert has_gate(x.half(), weight.half())
    assert has_gate(x[:, :448], weight[:, :448])
    assert not has_gate(x[:, 4:452], weight[:, 4:452])
    assert not has_gate(x.float(), weight.float())
    assert not has_gate(x, weight.half())
    assert not has_gate(x, weight[:, :448])
    assert not has_gate(x[:, :512], weight[:, :512])
    assert not has_gate(x, weight[:100])
    assert not has_gate(x[:0], weight)
    assert not has_gate(x.new_zeros(MAX_ROWS + 1, 896), weight)
    assert not has_gate(x.mT.contiguous().mT, weight)
    monkeypatch.setattr(jit, "arch_of", lambda device: "sm_80")
    assert not has_gate(x, weight)
    with pytest.raises(NotSupported, match="1 to 144 16-bit rows"):
        router_gate._function(x, weight)


@gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 33, 64, 65, 128, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize("normalize", [True, False])
def test_kernels_against_float64(rows, normalize):
    case = clear_case(rows, 8)
    used = torch.arange(rows) % 3 != 1
    for mask in (None, used):
        on_gpu = [t.cuda() for t in case]
        options = dict(normalize=normalize, used=None if mask is None else mask.cuda())
        got = router(*on_gpu, 8, SCALE, **options)
        assert_right(case, 8, got, normalize=normalize, used=mask)
    if rows > 1:
        exact, plain = exact_router(*case, 8)[1], plain_router(*case, 8)[1]
        assert_faults_are_found(router(*on_gpu, 8, SCALE)[1].cpu(), exact, plain, tile=4)
        with pytest.raises(AssertionError):
            assert_right(case, 8, router(*on_gpu[:2], on_gpu[2].flip(0), 8, SCALE))


@gpu
@pytest.mark.parametrize(("experts", "k"), [(8, 1), (8, 8), (31, 4), (33, 32), (64, 6), (256, 8), (1000, 16)])
def test_other_numbers_of_experts(experts, k):
    case = clear_case(9, min(k, experts - 1), experts=experts, width=256)
    assert_right(case, k, router(*(t.cuda() for t in case), k, SCALE))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("experts", "width"), [(384, 7168), (64, 448), (128, 896)])
def test_parts_of_the_product(experts, width, dtype):
    x, weight, _ = (t.cuda() for t in new_case(MAX_ROWS, experts, width, dtype))
    whole = router_gate(x, weight)
    pairs = list(zip(*(t.chunk(len(whole), dim=1) for t in (x, weight)), strict=True))
    exact = torch.stack([part.double() @ of_weight.double().mT for part, of_weight in pairs])
    plain = torch.stack([torch.mm(part, of_weight.mT, out_dtype=torch.float32) for part, of_weight in pairs])
    assert_within_budget(whole, exact, plain, "parts")
    with pytest.raises(AssertionError):
        assert_within_budget(whole.roll(1, 1), exact, plain, "parts")
    apart = x.new_full((len(x), width + 64), torch.nan)
    apart[:, :width] = x
    for rows in (1, *(n + more for n in ROWS for more in (0, 1))):
        assert torch.equal(router_gate(apart[:rows, :width], weight), whole[:, :rows])  # a row's sums know no others


@gpu
@pytest.mark.parametrize(("rows", "width", "parts"), [(MAX_ROWS + 1, 7168, 8), (401, 7168, 4), (401, 512, 1)])
def test_the_library_multiplies_many_rows_in_parts(rows, width, parts):
    x, weight, bias = (t.cuda() for t in new_case(rows, 384, width))
    got = gate_parts(x, weight, "auto")
    assert got.shape == (parts, rows, 384)
    assert got.dtype == torch.float32
    exact, plain = x.double() @ weight.double().mT, torch.mm(x, weight.mT, out_dtype=torch.float32)
    logits = sum(got[1:], got[0])  # in the order of the kernel
    assert_within_budget(logits, exact, plain, "logits")
    ids = router(x, weight, bias, 8, SCALE)[0]
    assert torch.equal(ids, _router_choose(logits[None], bias, None, 8, SCALE, True)[0])
    with pytest.raises(NotSupported):
        gate_parts(x, weight, "cuda")


@gpu
def test_ties_go_to_the_smaller_id_and_bad_logits_stay_in_range():
    logits = torch.zeros(6, 384)
    logits[1, 100:110] = 1.0
    logits[2, ::2] = -torch.inf
    logits[3, 7], logits[3, 300] = torch.inf, torch.nan
    logits[4] = torch.nan
    logits[5] = -torch.inf
    ids, _ = _router_choose(logits[None].cuda(), torch.zeros(384, device="cuda"), None, 8, SCALE, True)
    ids = ids.cpu()
    assert ids[0].tolist() == list(range(8))
    assert ids[1].tolist() == list(range(100, 108))
    assert ids[2].tolist() == list(range(1, 16, 2))
    assert ids[3, :2].tolist() == [300, 7]
    assert ids[4].tolist() == ids[5].tolist() == list(range(8))


@pytest.mark.parametrize(("offset", "step", "overlap"), [(0, 1, True), (1, 1, False), (0, 2, False)])
def test_a_bias_that_is_copied_is_waited_for(offset, step, overlap, monkeypatch):
    """The kernel reads it before its wait; no kernel runs here."""
    launches = []
    kernel = SimpleNamespace(launch=lambda *args, **how: launches.append((args, how)))
    monkeypatch.setattr(jit, "kernel", lambda *_: kernel)
    bias = torch.arange(128.0)[offset::step][:8]
    _router_choose._function(torch.zeros(1, 2, 8), bias, None, 2, SCALE, True)
    (_, _, _, passed, *_), how = launches[0]
    assert torch.equal(passed, bias)
    assert passed.is_contiguous()
    assert passed.data_ptr() % 16 == 0
    assert how == {"overlap": overlap}


@gpu
@pytest.mark.parametrize("place", [slice(1, 385), slice(0, 768, 2)], ids=["odd place", "strided"])
def test_a_bias_anywhere_chooses_alike(place):
    x, weight, bias = (t.cuda() for t in new_case(33, 384, 896))
    elsewhere = torch.full((768,), torch.nan, device="cuda")
    elsewhere[place] = bias
    for moved, own in zip(*(router(x, weight, b, 8, SCALE) for b in (elsewhere[place], bias)), strict=True):
        assert torch.equal(moved, own)
    assert not torch.equal(router(x, weight, bias.flip(0), 8, SCALE)[0], router(x, weight, bias, 8, SCALE)[0])


@gpu
def test_capture_replays_with_new_rows():
    case = [t.cuda() for t in clear_case(9, 8)]
    used = torch.ones(9, dtype=torch.bool, device="cuda")
    router(*case, 8, SCALE, used=used)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = router(*case, 8, SCALE, used=used)
    for flipped in (0, 4):
        case[0].copy_(case[0].flip(0))
        used[flipped] = False
        graph.replay()
        assert_right([t.cpu() for t in case], 8, got, used=used.cpu())


@gpu
def test_opcheck():
    parts, bias = torch.randn(2, 3, 64, device="cuda"), torch.randn(64, device="cuda")
    torch.library.opcheck(torch.ops.kdlab.router_choose.default, (parts, bias, None, 4, SCALE, True))
    x, weight, _ = (t.cuda() for t in new_case(3, 64, 448))
    torch.library.opcheck(torch.ops.kdlab.router_gate.default, (x, weight))
