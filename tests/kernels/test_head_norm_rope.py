"""head_norm_rope and append_context: heads per row against float64, context rows where they belong and nowhere else."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kdlab.config import RopeConfig
from kdlab.errors import ArgumentError, NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels.head_norm_rope import append_context, head_norm_rope, head_norm_rope_cost
from kdlab.kernels.reference import rms_norm
from kdlab.kernels.rope import apply_rope, rope_tables
from tests.kernels.compare import assert_faults_are_found, assert_within_budget, canary, guarded_allocations

gpu = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """Rows of heads (queries, keys, values), a context of two layers, and where both stand."""

    rows: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor
    start: Tensor
    count: Tensor
    keys: Tensor
    values: Tensor
    kv_heads: int

    def map(self, change):
        """Change the floats; the tables stay float32."""
        fields = ("rows", "q_weight", "k_weight", "keys", "values")
        return replace(self, **{name: change(getattr(self, name)) for name in fields})

    def to(self, device):
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def heads(self, impl="auto"):
        """Block rows: queries and keys."""
        x = self.rows[:, :, : -self.kv_heads]
        arguments = (x, self.q_weight, self.k_weight, self.cos, self.sin, self.start)
        return head_norm_rope(*arguments, num_queries=x.shape[2] - self.kv_heads, eps=EPS, impl=impl)

    def context_rows(self):
        """Context rows: keys and values of both layers, with strides, and the weights of their norms."""
        parts = (self.rows.narrow(2, first, 2 * self.kv_heads) for first in (self.rows.shape[2] - 2 * self.kv_heads, 0))
        k, v = (part.unflatten(2, (2, -1)).movedim(2, 0) for part in parts)
        return k, v, torch.stack((self.k_weight, self.q_weight))

    def append(self, impl="auto"):
        """The context with them."""
        rows = self.context_rows()  # first: the kernel reads the weights before the kernel ahead of it has ended
        keys, values = self.keys.clone(), self.values.clone()
        counts = (self.start, self.count)
        append_context(*rows, self.cos, self.sin, keys, values, *counts, eps=EPS, impl=impl)
        return keys, values


def new_case(dtype, starts=(0, 30, 7), counts=(5, 0, 3), *, n=5, heads=4, kv_heads=2, dim=16, capacity=40, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    streams = len(starts)
    rows = randn(streams, n, heads + 2 * kv_heads, dim) * (0.01 + torch.rand(streams, n, 1, 1, generator=generator))
    cos, sin = rope_tables(torch.arange(capacity + n), RopeConfig(dim=dim, theta=50000.0))
    past = [torch.full((2, streams, capacity + 1, kv_heads, dim), torch.nan) for _ in range(2)]
    start, count = (torch.tensor(numbers, dtype=torch.int32) for numbers in (starts, counts))
    weights = [1 + 0.3 * randn(dim) for _ in range(2)]
    floats = [t.to(dtype) for t in (rows, *weights)]
    return Case(*floats, cos, sin, start, count, *(t.to(dtype) for t in past), kv_heads)


def empty(case):
    """The same without any row."""
    return replace(case, rows=case.rows[:, :0])


def expected_heads(case):
    """Oracle: one head after the other."""
    out = case.rows[:, :, : -case.kv_heads].clone()
    for stream, start in enumerate(case.start.tolist()):
        for row in range(out.shape[1]):
            for head in range(out.shape[2]):
                weight = case.q_weight if head < out.shape[2] - case.kv_heads else case.k_weight
                at = min(max(start + row, 0), len(case.cos) - 1)
                normed = rms_norm(out[stream, row, head], weight, EPS)
                out[stream, row, head] = apply_rope(normed, case.cos[at], case.sin[at], interleaved=False)
    return out


def expected_context(case):
    """Oracle: the context with one row after the other."""
    k, v, weights = case.context_rows()
    keys, values = case.keys.clone(), case.values.clone()
    for layer, weight in enumerate(weights):
        for stream, (start, count) in enumerate(zip(case.start.tolist(), case.count.tolist(), strict=True)):
            for row in range(count):
                at = start + row
                normed = rms_norm(k[layer, stream, row], weight, EPS)
                keys[layer, stream, at] = apply_rope(normed, case.cos[at], case.sin[at], interleaved=False)
                values[layer, stream, at] = v[layer, stream, row]
    return keys, values


def assert_same(ours, theirs, rows=slice(None)):
    for got, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(got[:, :, rows].nan_to_num(77), wanted[:, :, rows].nan_to_num(77))


def assert_right(case, got=None):
    """The kernel's heads and context rows against float64."""
    on_gpu = case.to("cuda")
    heads, (keys, values) = got or (on_gpu.heads("cuda"), on_gpu.append("cuda"))
    exact, plain = case.map(Tensor.double), case
    assert_within_budget(heads, expected_heads(exact), expected_heads(plain))
    assert_within_budget(keys, expected_context(exact)[0], expected_context(plain)[0])
    assert_same((values.cpu(),), (expected_context(plain)[1],))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_auto_on_the_cpu_is_the_reference(dtype):
    case = new_case(dtype)
    assert torch.equal(case.heads(), expected_heads(case))
    assert_same(case.append(), expected_context(case), slice(0, -1))  # the last row is the bin
    assert empty(case).heads().shape[1] == 0
    assert_same(empty(case).append(), (case.keys, case.values))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(x=torch.zeros(3, 5, 6)), ShapeError, "x"),
        (dict(x=torch.zeros(3, 5, 0, 16), num_queries=0), ShapeError, "heads of floats"),
        (dict(x=torch.zeros(3, 5, 6, 15)), ShapeError, "even number"),
        (dict(q_weight=torch.zeros(8)), ShapeError, "q_weight"),
        (dict(k_weight=torch.zeros(16).half()), ShapeError, "as the rows"),
        (dict(cos=torch.zeros(45, 16)), ShapeError, "cos"),
        (dict(sin=torch.zeros(44, 8)), ShapeError, "sin"),
        (dict(start=torch.zeros(2, dtype=torch.int32)), ShapeError, "start"),
        (dict(start=torch.zeros(3)), ShapeError, "integer"),
        (dict(start=torch.zeros(3, dtype=torch.int32, device="meta")), ShapeError, "on cpu"),
        (dict(num_queries=7), ArgumentError, "num_queries"),
        (dict(impl="fast"), ArgumentError, "impl"),
        (dict(impl="cuda"), UnsupportedDevice, "cpu"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change, error, message):
    case = new_case(torch.float32)
    right = dict(x=case.rows[:, :, :6], q_weight=case.q_weight, k_weight=case.k_weight, cos=case.cos, sin=case.sin)
    with pytest.raises(error, match=message):
        head_norm_rope(**(right | dict(start=case.start, num_queries=4, eps=EPS) | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(v=torch.zeros(2, 3, 5, 1, 16)), "v"),
        (dict(weight=torch.zeros(16)), "weight"),
        (dict(keys=torch.zeros(1, 3, 41, 2, 16)), "keys"),
        (dict(values=torch.zeros(2, 3, 40, 2, 16)), "values"),
        (dict(values=torch.zeros(2, 3, 41, 2, 16).half()), "as the rows"),
        (dict(count=torch.zeros(3, 1, dtype=torch.int32)), "count"),
    ],
    ids=str,
)
def test_wrong_contexts_are_named(change, message):
    case = new_case(torch.float32)
    k, v, weight = case.context_rows()
    right = dict(k=k, v=v, weight=weight, cos=case.cos, sin=case.sin, keys=case.keys, values=case.values)
    with pytest.raises(ShapeError, match=message):
        append_context(**(right | dict(start=case.start, count=case.count, eps=EPS) | change))
    assert case.keys.isnan().all()


def test_fake_tensors():
    real = new_case(torch.bfloat16, dim=128)
    k, v, weights = real.context_rows()
    views = dict(x=real.rows[:, :, :6], k=k, v=v, far=real.keys[:, :, ::2], weight=real.k_weight, weights=weights)
    with FakeTensorMode():
        # Nothing slices these: without a GPU torch cannot index fakes on one.
        x, k, v, far, weight, weights, keys, values, cos, sin, start, count = (
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
            for t in (*views.values(), real.keys, real.values, real.cos, real.sin, real.start, real.count)
        )
        block = dict(q_weight=weight, k_weight=weight, cos=cos, sin=sin, num_queries=4, eps=EPS, impl="cuda")
        assert head_norm_rope(x, start=start, **block).shape == x.shape
        with pytest.raises(ShapeError, match=r"start: expected contiguous torch.int32"):
            head_norm_rope(x, start=start.long(), **block)
        wide = block | dict(q_weight=weight.double(), k_weight=weight.double())
        with pytest.raises(NotSupported, match="float32, bfloat16 or float16"):
            head_norm_rope(x.double(), start=start, **wide)
        append_context(k, v, weights, cos, sin, keys, values, start, count, eps=EPS, impl="cuda")
        with pytest.raises(ShapeError, match="keys: expected contiguous streams"):
            append_context(k, v, weights, cos, sin, far, far, start, count, eps=EPS, impl="cuda")


def test_cost():
    assert head_norm_rope_cost(8, 9, 128).bytes == 8 * (2 * 9 * 128 * 2 + 512)


@gpu
@pytest.mark.parametrize("dim", [2, 32, 64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_against_float64(dtype, dim):
    case = new_case(dtype, dim=dim, heads=8, kv_heads=1 if dim == 128 else 2)
    on_gpu = case.to("cuda")
    with guarded_allocations() as check:
        heads = on_gpu.heads("cuda")
    check()
    assert_right(case, (heads, on_gpu.append("cuda")))
    assert_faults_are_found(heads.cpu(), expected_heads(case.map(Tensor.double)), expected_heads(case))
    with pytest.raises(AssertionError):
        assert_right(replace(case, start=case.start + 1), (heads, on_gpu.append("cuda")))
    assert empty(on_gpu).heads("cuda").shape[1] == 0
    assert_same(empty(on_gpu).append("cuda"), (on_gpu.keys, on_gpu.values))


@gpu
def test_far_positions():
    case = new_case(torch.bfloat16, (262_139, 131_072), (5, 2), dim=32, kv_heads=1, capacity=262_144)
    assert_right(case)


@gpu
def test_rows_without_a_place_are_not_written():
    case = new_case(torch.bfloat16, (38, 2**31 - 3, -2), (5, 5, 5), dim=64).to("cuda")
    rows = case.context_rows()
    (keys, check_keys), (values, check_values) = (canary(t.shape, t.dtype, "cuda") for t in (case.keys, case.values))
    arguments = (*rows, case.cos, case.sin, keys, values, case.start, case.count)
    append_context(*arguments, eps=EPS, impl="cuda")
    check_keys()
    check_values()
    for written in (~keys.isnan()).all(-1).all(-1):
        assert written[0].nonzero().flatten().tolist() == [38, 39, 40]  # 40 is the bin
        assert not written[1].any()
        assert written[2].nonzero().flatten().tolist() == [0, 1, 2]
    assert case.heads("cuda").isfinite().all()


@gpu
def test_capture_replays_with_new_starts():
    case = new_case(torch.bfloat16, dim=64)
    on_gpu = case.to("cuda")
    counts = (on_gpu.start, on_gpu.count)
    arguments = (*on_gpu.context_rows(), on_gpu.cos, on_gpu.sin, on_gpu.keys, on_gpu.values, *counts)

    def both():
        append_context(*arguments, eps=EPS)
        return on_gpu.heads()

    both()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        heads = both()
    for starts, counts in (((3, 8, 0), (2, 5, 0)), ((20, 0, 33), (0, 1, 5))):
        on_gpu.keys.fill_(torch.nan)
        on_gpu.values.fill_(torch.nan)
        on_gpu.start.copy_(torch.tensor(starts))
        on_gpu.count.copy_(torch.tensor(counts))
        graph.replay()
        assert_right(new_case(torch.bfloat16, starts, counts, dim=64), (heads, (on_gpu.keys, on_gpu.values)))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_nothing_waits_for_the_gpu(dtype):
    case = new_case(dtype, dim=64).to("cuda")
    case.heads(), case.append()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.heads(), case.append()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_opcheck():
    case = new_case(torch.bfloat16, dim=64).to("cuda")
    tables = (case.cos, case.sin)
    block = (case.rows[:, :, :6], case.q_weight, case.k_weight, *tables, case.start, 4, EPS)
    torch.library.opcheck(torch.ops.kdlab.head_norm_rope.default, block)
    context = (*case.context_rows(), *tables, case.keys, case.values, case.start, case.count, EPS)
    torch.library.opcheck(torch.ops.kdlab.append_context.default, context)
