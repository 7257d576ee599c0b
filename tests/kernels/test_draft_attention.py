"""draft_attention: every row against float64, over windows, tile edges, shared contexts and rows that hold NaN."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels.draft_attention import _merge_warps, _num_splits, draft_attention, draft_attention_cost
from tests.kernels.compare import assert_faults_are_found, assert_within_budget, guarded_allocations

gpu = pytest.mark.gpu
MASKS = [(None, False), (None, True), (5, False), (100, True), (100, False), (1, False)]
EDGES = (0, 1, 55, 56, 57, 63, 64, 65, 120, 128, 500)


@dataclass(frozen=True)
class Case:
    """The arguments of draft_attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    start: Tensor
    window: int | None = None
    causal: bool = False

    def tensors(self):
        return self.q, self.k, self.v, self.keys, self.values, self.start

    def run(self, impl="auto", **options):
        return draft_attention(*self.tensors(), window=self.window, causal=self.causal, impl=impl, **options)

    def map(self, change):
        changed = (change(t) if t.is_floating_point() else t for t in self.tensors())
        return Case(*changed, self.window, self.causal)


def new_case(
    starts,
    *,
    width=8,
    heads=8,
    kv_heads=1,
    dim=128,
    dtype=torch.float32,
    shared=False,
    capacity=None,
    device="cpu",
    window=None,
    causal=False,
):
    """Rows from each start on hold NaN, with a spare row at the end; q, k and v are parts of one product."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    qkv = randn(len(starts), width, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
    rows = (capacity or max(starts)) + 1
    past = [randn(1 if shared else len(starts), rows, kv_heads, dim) for _ in range(2)]
    for tensor in past:
        for stream, start in enumerate([max(starts)] if shared else starts):
            tensor[stream, start:] = torch.nan
    return Case(q, k, v, *past, torch.tensor(starts, dtype=torch.int32, device=device), window, causal)


def row_by_row(case):
    """Oracle: each slot and head alone, over the keys that it sees, in Python."""
    out = torch.zeros_like(case.q)
    group = case.q.shape[2] // case.k.shape[2]
    for stream, start in enumerate(case.start.tolist()):
        context = stream if len(case.keys) > 1 else 0
        for head in range(case.q.shape[2]):
            at = head // group
            keys = torch.cat([case.keys[context, :start, at], case.k[stream, :, at]])
            values = torch.cat([case.values[context, :start, at], case.v[stream, :, at]])
            for slot in range(case.q.shape[1]):
                here, near = start + slot, case.window or len(keys)
                seen = [j for j in range(len(keys)) if abs(j - here) < near and not (case.causal and j > here)]
                weights = (keys[seen] @ case.q[stream, slot, head] * case.q.shape[-1] ** -0.5).softmax(0)
                out[stream, slot, head] = weights @ values[seen]
    return out


def assert_right(case, out=None):
    """The kernel against the reference in float64, row by row."""
    out = case.run("cuda") if out is None else out
    assert_within_budget(out, case.map(Tensor.double).run("reference"), case.run("reference"))


@pytest.mark.parametrize(("window", "causal"), MASKS)
@pytest.mark.parametrize("shared", [False, True])
def test_reference_is_the_sum_over_visible_keys(window, causal, shared):
    case = new_case((0, 3, 9), width=4, heads=4, kv_heads=2, dim=6, dtype=torch.float64, shared=shared)
    case = replace(case, window=window, causal=causal)
    torch.testing.assert_close(case.run(), row_by_row(case))
    other = replace(case, window=3, causal=not causal)
    assert not torch.allclose(other.run(), row_by_row(case))


def test_zero_queries_give_the_mean():
    for start in range(0, 20):
        case = new_case((start,), width=3, heads=2, dim=4)
        mean = torch.cat([case.values[0, :start, 0], case.v[0, :, 0]]).mean(0)
        torch.testing.assert_close(replace(case, q=torch.zeros_like(case.q)).run(), mean.expand(1, 3, 2, 4))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(q=torch.zeros(2, 4, 8)), ShapeError, "q"),
        (dict(q=torch.zeros(2, 0, 4, 32)), ShapeError, "no empty"),
        (dict(q=torch.zeros(2, 4, 3, 32)), ShapeError, "divides 3"),
        (dict(v=torch.zeros(2, 4, 1, 32)), ShapeError, "v"),
        (dict(k=torch.zeros(2, 4, 2, 32).half()), ShapeError, "k: expected torch.float32"),
        (dict(keys=torch.zeros(3, 10, 2, 32)), ShapeError, "1 or 2 streams"),
        (dict(values=torch.zeros(2, 9, 2, 32)), ShapeError, "values"),
        (dict(start=torch.zeros(3, dtype=torch.int32)), ShapeError, "start"),
        (dict(start=torch.zeros(2)), ShapeError, "integer"),
        (dict(start=torch.tensor([0, 11])), ArgumentError, "start"),
        (dict(start=torch.tensor([-1, 0])), ArgumentError, "start"),
        (dict(v=torch.zeros(2, 4, 2, 32, device="meta")), ShapeError, "on cpu"),
        (dict(window=0), ArgumentError, "window"),
        (dict(impl="fast"), ArgumentError, "impl"),
        (dict(impl="cuda"), UnsupportedDevice, "cpu"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change, error, message):
    case = new_case((9, 3), width=4, heads=4, kv_heads=2, dim=32)
    names = dict(zip(("q", "k", "v", "keys", "values", "start"), case.tensors(), strict=True))
    with pytest.raises(error, match=message):
        draft_attention(**(names | dict(window=None, causal=False) | change))


def fake(t):
    """Use under FakeTensorMode. Nothing slices these: without a GPU torch cannot index fakes on one."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")


def test_fake_tensors():
    real = new_case((9, 3), heads=8, kv_heads=2, dtype=torch.bfloat16)
    narrow = new_case((9, 3), heads=8, kv_heads=2, dtype=torch.bfloat16, dim=48)
    heads_apart = real.q.transpose(1, 2).contiguous().transpose(1, 2)
    with FakeTensorMode():
        case = Case(*map(fake, real.tensors()))
        assert case.run("cuda").shape == real.q.shape
        with pytest.raises(ShapeError, match="start: expected contiguous int32"):
            replace(case, start=case.start.long()).run("cuda")
        with pytest.raises(ShapeError, match="q: expected heads side by side"):
            replace(case, q=fake(heads_apart)).run("cuda")
        with pytest.raises(NotSupported, match="bfloat16 or float16"):
            case.map(Tensor.float).run("cuda")
        with pytest.raises(NotSupported, match="heads of 32, 64, 128"):
            Case(*map(fake, narrow.tensors())).run("cuda")


def quotient(x, n):
    """What the source computes in place of x / n."""
    return ((x.astype(np.float32) + np.float32(0.5)) * np.float32(1 / n)).astype(np.int32)


@pytest.mark.parametrize("n", [*range(1, 133), 1000, 4097, 65_537, 2**20 - 1])
def test_floats_divide_exactly_below_2_to_the_21(n):
    multiples = np.arange(0, 2**21, n, dtype=np.int64)
    for x in (multiples, multiples[1:] - 1, multiples[:-1] + 1):
        assert np.array_equal(quotient(x, n), x // n)
    beyond = np.arange(2**24, 2**24 + 1000)
    assert not np.array_equal(quotient(beyond, 3), beyond // 3)


@pytest.mark.parametrize("multiprocessors", [8, 132])
@pytest.mark.parametrize("num_keys", [9, 64, 65, 8200, 262_152])
@pytest.mark.parametrize("units", [1, 3, 8, 64, 1000])
def test_parts_fill_the_card_once_and_their_warps_run_at_once(units, num_keys, multiprocessors):
    splits = _num_splits(units, num_keys, multiprocessors)
    assert 1 <= splits <= -(-num_keys // 64)
    assert splits == 1 or units * splits <= 2 * multiprocessors
    warps = _merge_warps(64 * units, splits, multiprocessors)
    assert warps in (1, 2, 4, 8, 16, 32)
    assert warps <= splits
    assert warps == 1 or 64 * units * warps <= 32 * multiprocessors


def test_cost():
    cost = draft_attention_cost((8192,), 8, 8, 1, 128)
    assert cost.bytes == 2 * (2 * 8200 * 128 + 2 * 64 * 128)
    assert cost.flops == 4 * 8200 * 64 * 128
    near = draft_attention_cost((8192, 10), 8, 8, 1, 128, window=64)
    assert near.flops == 4 * (71 + 18) * 64 * 128


@gpu
@pytest.mark.parametrize(("window", "causal"), MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernel_against_float64(dtype, window, causal):
    case = new_case(EDGES, kv_heads=2, heads=16, dtype=dtype, device="cuda", window=window, causal=causal)
    with guarded_allocations() as check:
        out = case.run("cuda")
    check()
    assert_right(case, out)
    exact, plain = case.map(Tensor.double).run("reference"), case.run("reference")
    assert_faults_are_found(out, exact, plain)
    with pytest.raises(AssertionError):
        assert_within_budget(replace(case, window=3, causal=not causal).run("cuda"), exact, plain)


@gpu
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize(
    ("width", "heads", "kv_heads"), [(8, 64, 8), (16, 8, 1), (16, 64, 8), (8, 4, 2), (16, 4, 2), (7, 15, 5), (2, 1, 1)]
)
def test_shapes(dim, width, heads, kv_heads):
    shape = dict(width=width, heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16, device="cuda")
    for window, causal in ((None, False), (70, True)):
        assert_right(new_case((0, 63, 300), window=window, causal=causal, **shape))


@gpu
def test_every_length():
    for first in range(0, 300, 25):
        starts = tuple(range(first, first + 25))
        case = new_case(starts, dim=64, dtype=torch.bfloat16, device="cuda")
        assert_right(case)
        assert_right(replace(case, q=torch.zeros_like(case.q)))


@gpu
@pytest.mark.parametrize("streams", [1, 4])
def test_long_contexts(streams):
    starts = (262_144, 8_191, 0, 131_073)[:streams]
    case = new_case(starts, dtype=torch.bfloat16, device="cuda")
    assert_right(case)
    assert_right(replace(case, window=4096, causal=True))
    # One loud key at each end of what is visible, and one just out of sight.
    loud = case.q[0, 3, 2] * 4
    for at, seen in ((0, True), (starts[0] - 1, True), (starts[0] - 4096 + 3, False), (starts[0] - 4095 + 3, True)):
        near = replace(case, window=None if at in (0, starts[0] - 1) else 4096, keys=case.keys.clone())
        near.keys[0, at, 0] = loud
        assert_right(near)
        moved = (near.run("cuda")[0, 3, 2] - replace(near, keys=case.keys).run("cuda")[0, 3, 2]).abs().max()
        assert (moved > 0.1) == seen


@gpu
def test_streams_share_a_context():
    case = new_case((100, 0, 64, 33), shared=True, dtype=torch.bfloat16, device="cuda")
    assert_right(case)
    alone = replace(case, keys=case.keys.expand(4, -1, -1, -1), values=case.values.expand(4, -1, -1, -1))
    assert torch.equal(case.run("cuda"), alone.run("cuda"))


@gpu
def test_starts_beyond_the_context_read_nothing_there():
    case = new_case((50, 50, 50), dtype=torch.bfloat16, device="cuda")
    case.keys[:, 50] = case.values[:, 50] = 1  # the spare row; behind it memory of other tensors
    wild = replace(case, start=torch.tensor([2**31 - 1, -5, 50], dtype=torch.int32, device="cuda"))
    near = replace(case, start=torch.tensor([51, 0, 50], dtype=torch.int32, device="cuda"))
    assert torch.equal(wild.run("cuda"), near.run("cuda"))


@gpu
def test_capture_replays_with_new_starts_and_equal_bits():
    case = new_case((2000, 2000, 2000), capacity=40_000, dtype=torch.bfloat16, device="cuda")
    case.run("cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = case.run("cuda")
    for starts in ((2000, 0, 64), (1, 1999, 700)):
        case.start.copy_(torch.tensor(starts))
        graph.replay()
        assert_right(case, out)
        assert torch.equal(out, case.run("cuda"))


@gpu
def test_nothing_waits_for_the_gpu():
    case = new_case((500, 3), dtype=torch.bfloat16, device="cuda")
    wide = case.map(Tensor.double)
    case.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run()
        wide.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_opcheck():
    case = new_case((9, 3), dtype=torch.bfloat16, device="cuda")
    torch.library.opcheck(torch.ops.kdlab.draft_attention.default, (*case.tensors(), 100, True, False))
