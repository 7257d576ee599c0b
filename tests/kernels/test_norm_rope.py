"""norm_rope: cache rows and rotated queries per row against float64, and nothing else written."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kdlab.config import RopeConfig
from kdlab.errors import ArgumentError, ShapeError, UnsupportedDevice
from kdlab.kernels.norm_rope import norm_rope, norm_rope_cost
from kdlab.kernels.reference import rms_norm
from kdlab.kernels.rope import apply_rope, rope_tables
from tests.kernels.compare import assert_faults_are_found, assert_within_budget, canary

gpu = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6


class Case(NamedTuple):
    """The tensor arguments of norm_rope, in its order."""

    kv: Tensor
    q_rope: Tensor
    norm_weight: Tensor
    cos: Tensor
    sin: Tensor
    pages: Tensor
    block_table: Tensor
    prefix_len: Tensor
    num_nodes: Tensor
    q: Tensor

    def to(self, device):
        """Tables and counts keep their dtypes; views become contiguous."""
        return Case(*(t.to(device) for t in self))

    def double(self):
        """Floats as float64."""
        return Case(*(t.double() if t.is_floating_point() else t.clone() for t in self))


def new_case(dtype, prefixes=(62, 0, 5), used=(9, 0, 4), rows=9, heads=8, latent=512, rope=64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    streams = len(prefixes)
    prefix = torch.tensor(prefixes, dtype=torch.int32)
    positions = prefix[:, None] + torch.arange(rows) // 2
    cos, sin = rope_tables(positions, RopeConfig(dim=rope, theta=50000.0))
    table_width = -(-(max(prefixes) + rows) // 64)
    table = torch.randperm(streams * table_width, generator=generator).int().view(streams, table_width)
    kv = randn(streams, rows, latent + rope) * (0.01 + torch.rand(streams, rows, 1, generator=generator)).to(dtype)
    q = torch.full((streams, rows, heads, latent + rope), torch.nan).to(dtype)
    pages = torch.full((table.numel() + 1, 64, latent + rope), torch.nan).to(dtype)
    counts = torch.tensor(used, dtype=torch.int32)
    weight = 1 + 0.3 * randn(latent)
    return Case(kv, randn(streams, rows, heads, rope), weight, cos, sin, pages, table, prefix, counts, q)


def written(case, interleaved):
    """Oracle: (pages, q) with one used row after the other written into copies."""
    pages, q, latent = case.pages.clone(), case.q.clone(), case.norm_weight.shape[0]
    for stream, count in enumerate(case.num_nodes.tolist()):
        for row in range(count):
            page, at = divmod(int(case.prefix_len[stream]) + row, 64)
            cos, sin = case.cos[stream, row], case.sin[stream, row]
            raw = case.kv[stream, row]
            new = rms_norm(raw[:latent], case.norm_weight, EPS), apply_rope(raw[latent:], cos, sin, interleaved)
            pages[case.block_table[stream, page], at] = torch.cat(new)
            q[stream, row, :, latent:] = apply_rope(case.q_rope[stream, row], cos, sin, interleaved)
    return pages, q


def run_on_gpu(case, interleaved):
    """(pages, q) of the kernel, both between canaries."""
    on_gpu = case.to("cuda")
    pages, check_pages = canary(case.pages.shape, case.pages.dtype, "cuda")
    q, check_q = canary(case.q.shape, case.q.dtype, "cuda")
    norm_rope(*on_gpu._replace(pages=pages.copy_(case.pages), q=q.copy_(case.q)), eps=EPS, interleaved=interleaved)
    check_pages()
    check_q()
    return pages.cpu(), q.cpu()


def assert_right(case, got, interleaved):
    exact, plain, latent = written(case.double(), interleaved), written(case, interleaved), case.norm_weight.shape[0]
    for ours, best, torchs, name in zip(got, exact, plain, ("pages", "q"), strict=True):
        assert_within_budget(ours[..., :latent], best[..., :latent], torchs[..., :latent], f"{name} latent")
        assert_within_budget(ours[..., latent:], best[..., latent:], torchs[..., latent:], f"{name} rope")
        # The rotation is rounded product by product as in torch, so it has torch's very bits.
        assert torch.equal(ours[..., latent:].nan_to_num(7), torchs[..., latent:].nan_to_num(7))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_auto_on_the_cpu_is_the_reference(dtype, interleaved):
    case = new_case(dtype, latent=24, rope=8, heads=3)
    expected = written(case, interleaved)
    norm_rope(*case, eps=EPS, interleaved=interleaved)
    for got, wanted in zip((case.pages, case.q), expected, strict=True):
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(kv=torch.zeros(3, 9, 33)), ShapeError, "norm_weight"),
        (dict(q_rope=torch.zeros(3, 9, 3, 7), norm_weight=torch.ones(25)), ShapeError, r"cos|even"),
        (dict(q_rope=torch.zeros(3, 8, 3, 8)), ShapeError, "q_rope"),
        (dict(cos=torch.zeros(3, 9, 8)), ShapeError, "cos"),
        (dict(pages=torch.zeros(4, 32, 32)), ShapeError, "pages"),
        (dict(prefix_len=torch.zeros(2, dtype=torch.int32)), ShapeError, "prefix_len"),
        (dict(num_nodes=torch.zeros(3, 1, dtype=torch.int32)), ShapeError, "num_nodes"),
        (dict(q=torch.zeros(3, 9, 3, 33)), ShapeError, "q"),
        (dict(q=torch.zeros(3, 9, 3, 32).half()), ShapeError, "float32, as kv"),
        (dict(sin=torch.zeros(3, 9, 4, device="meta")), ShapeError, "on cpu"),
        (dict(prefix_len=torch.tensor([62, 0, 126], dtype=torch.int32)), ArgumentError, "cache rows"),
        (dict(block_table=torch.full((3, 2), 99, dtype=torch.int32)), ArgumentError, "block_table: expected pages"),
        (dict(block_table=torch.full((3, 2), -1, dtype=torch.int32)), ArgumentError, "block_table: expected pages"),
        (dict(impl="fast"), ArgumentError, "impl"),
        (dict(impl="cuda"), UnsupportedDevice, "cpu"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change, error, message):
    case = new_case(torch.float32, latent=24, rope=8, heads=3)
    with pytest.raises(error, match=message):
        norm_rope(**(case._asdict() | dict(eps=EPS, interleaved=True) | change))
    assert case.pages.isnan().all()
    assert case.q.isnan().all()


def test_fake_tensors():
    real = new_case(torch.bfloat16)  # outside of the mode: what it makes is kept for later calls
    with FakeTensorMode():
        case = Case(*(torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in real))
        norm_rope(*case, eps=EPS, interleaved=True)
        with pytest.raises(ShapeError, match=r"num_nodes: expected contiguous torch.int32"):
            norm_rope(*case._replace(num_nodes=case.num_nodes.long()), eps=EPS, interleaved=True)
        with pytest.raises(ShapeError, match="kv: expected float32, bfloat16 or float16"):
            norm_rope(*(t.double() if t.is_floating_point() else t for t in case), eps=EPS, interleaved=True)


def test_cost():
    assert norm_rope_cost(33, 64, 512, 64).bytes == 33 * ((2 * 576 + 2 * 64 * 64) * 2 + 256) + 1024


@gpu
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_against_float64(dtype, interleaved):
    case = new_case(dtype)
    got = run_on_gpu(case, interleaved)
    assert_right(case, got, interleaved)
    with pytest.raises(AssertionError):
        assert_right(case, got, not interleaved)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_comparison_finds_faults(dtype):
    case = new_case(dtype, prefixes=(0,), used=(9,))
    pages, q = run_on_gpu(case, True)
    page = int(case.block_table[0, 0])
    exact, plain = written(case.double(), True), written(case, True)
    new = [t[0][page, :9, :512] for t in ((pages, q), exact, plain)]
    assert_faults_are_found(*new, what="cache rows")
    assert_faults_are_found(*(t[1][0, :, :, 512:] for t in ((pages, q), exact, plain)), what="queries")


@gpu
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (24, 8), (1, 2), (129, 6), (1000, 128)])
@pytest.mark.parametrize("heads", [1, 8, 9, 64])
def test_other_widths(latent, rope, heads):
    case = new_case(torch.bfloat16, heads=heads, latent=latent, rope=rope)
    assert_right(case, run_on_gpu(case, True), True)


@gpu
@pytest.mark.parametrize("prefix", [0, 1, 55, 63, 64, 65, 1000])
@pytest.mark.parametrize("used", [1, 2, 63, 65])
def test_page_edges(prefix, used):
    case = new_case(torch.bfloat16, prefixes=(prefix, 3), used=(used, 1), rows=65)
    assert_right(case, run_on_gpu(case, True), True)


@gpu
def test_unused_rows_may_hold_anything_and_all_may_be_unused():
    case = new_case(torch.bfloat16)
    case.kv[0, 5:], case.kv[1], case.q_rope[0, 5:] = torch.nan, torch.nan, torch.nan
    case = case._replace(num_nodes=torch.tensor([5, 0, 4], dtype=torch.int32))
    assert_right(case, run_on_gpu(case, True), True)
    nothing = case._replace(num_nodes=torch.zeros(3, dtype=torch.int32))
    pages, q = run_on_gpu(nothing, True)
    assert pages.isnan().all()
    assert q.isnan().all()


@gpu
def test_views_are_read_in_place():
    case = new_case(torch.bfloat16).to("cuda")
    streams, rows, heads, rope = case.q_rope.shape
    wide_kv = torch.full((streams, rows, 96 + 576), torch.nan, device="cuda", dtype=torch.bfloat16)
    wide_q = torch.full((streams, rows, heads, 33 + rope), torch.nan, device="cuda", dtype=torch.bfloat16)
    wide_kv[..., 96:], wide_q[..., 33:] = case.kv, case.q_rope
    views = case._replace(kv=wide_kv[..., 96:], q_rope=wide_q[..., 33:])
    norm_rope(*views, eps=EPS, interleaved=True)
    assert_right(new_case(torch.bfloat16), (views.pages.cpu(), views.q.cpu()), True)


@gpu
@pytest.mark.parametrize("fault", ["prefix", "negative", "page", "far page"])
def test_rows_without_a_place_are_not_written(fault):
    case = new_case(torch.bfloat16)
    pages, q = written(case, True)
    table, prefix = case.block_table.clone(), case.prefix_len.clone()
    if fault in ("prefix", "negative"):
        prefix[2] = 2**31 - 2 if fault == "prefix" else -100
    else:
        table[2, 0] = -1 if fault == "page" else len(case.pages)
    got, got_q = run_on_gpu(case._replace(block_table=table, prefix_len=prefix), True)
    pages[case.block_table[2, 0]] = torch.nan
    assert torch.equal(got.isnan(), pages.isnan())
    assert torch.equal(got_q.nan_to_num(7), q.nan_to_num(7))


@gpu
def test_capture_replays_with_new_counts():
    case = new_case(torch.bfloat16).to("cuda")
    norm_rope(*case._replace(pages=case.pages.clone(), q=case.q.clone()), eps=EPS, interleaved=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm_rope(*case, eps=EPS, interleaved=True)
    for counts in ((9, 0, 4), (2, 9, 0)):
        case.pages.fill_(torch.nan)
        case.q.fill_(torch.nan)
        case.num_nodes.copy_(torch.tensor(counts))
        graph.replay()
        assert_right(new_case(torch.bfloat16, used=counts), (case.pages.cpu(), case.q.cpu()), True)


@gpu
def test_opcheck():
    torch.library.opcheck(torch.ops.kdlab.norm_rope.default, (*new_case(torch.bfloat16).to("cuda"), EPS, True, False))
