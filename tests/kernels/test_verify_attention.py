"""verify_attention without a GPU: arguments, the reference on the CPU, the choice of a kernel, fake kernel, cost."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kdlab.errors import ArgumentError, UnsupportedDevice
from kdlab.kernels.verify_attention import _op, choose_impl, verify_attention, verify_attention_cost
from tests.kernels.compare import assert_within_budget
from tests.kernels.verify_cases import SCALE, bitsets, make_case, random_parents, with_bit, with_key


def small_case(dtype=torch.float32):
    return make_case([70, 0, 5], [9, 33, 0], 2, dtype=dtype, device="cpu", latent=24, rope=8)


def attend(case, **options):
    return verify_attention(*case.tensors, scale=SCALE, latent_dim=case.latent, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_on_the_cpu_auto_is_the_reference(dtype):
    case = small_case(dtype)
    (o, lse), (exact, exact_lse) = attend(case), case.expected()
    assert o.dtype == dtype
    assert_within_budget(o, exact, case.expected(dtype)[0])
    torch.testing.assert_close(lse, exact_lse, atol=1e-5, rtol=1e-6)
    assert torch.equal(o, attend(case, impl="reference")[0])


def test_unused_rows_give_zero_and_nothing_reads_them():
    o, lse = attend(small_case())
    assert o.isfinite().all()
    for stream, count in enumerate((9, 33, 0)):
        assert (o[stream, count:] == 0).all()
        assert (lse[stream, count:] == -torch.inf).all()
        assert lse[stream, :count].isfinite().all()


def test_a_loud_sibling_is_not_heard():
    case = small_case()
    row, other = next((i, j) for i in range(9) for j in range(i) if not case.mask()[0, i, j])
    loud = with_key(case, 0, 70 + other, 100.0)
    quiet = case.mask()[0, :9, other].logical_not()
    o, before = attend(loud)[0][0, :9], attend(case)[0][0, :9]
    assert torch.equal(o[quiet], before[quiet])
    assert (o[other] - before[other]).abs().max() > 1
    leaked = attend(with_bit(loud, 0, row, other))[0][0, row]  # the broken twin
    assert (leaked - o[row]).abs().max() > 1


def test_random_trees_are_valid():
    import numpy as np

    parents = random_parents(130, np.random.default_rng(0))
    assert all(0 <= parent < row for row, parent in enumerate(parents) if row)
    words = bitsets(parents, 140)
    bits = (words[:, :, None] >> np.arange(32, dtype=np.uint32) & 1).reshape(140, -1)[:130, :130].astype(bool)
    assert bits.diagonal().all()
    assert not np.triu(bits, 1).any()
    for row in range(1, 130):
        assert (bits[row, : row + 1] == (bits[parents[row], : row + 1] | (np.arange(row + 1) == row))).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("q", torch.zeros(3, 33, 32)),
        ("q", torch.zeros(3, 33, 2, 32, dtype=torch.int32)),
        ("q", torch.zeros(3, 33, 0, 32)),
        ("pages", torch.zeros(12, 32, 32)),
        ("pages", torch.zeros(0, 64, 32)),
        ("pages", torch.zeros(12, 64, 31)),
        ("pages", torch.zeros(12, 64, 32, dtype=torch.bfloat16)),
        ("block_table", torch.zeros(2, 4, dtype=torch.int32)),
        ("block_table", torch.zeros(3, 4)),
        ("block_table", torch.zeros(3, 0, dtype=torch.int32)),
        ("block_table", torch.zeros(1, 1, dtype=torch.int32).expand(3, 2**25)),
        ("prefix_len", torch.zeros(2, dtype=torch.int32)),
        ("prefix_len", torch.tensor([0, -1, 0], dtype=torch.int32)),
        ("prefix_len", torch.tensor([0, 10_000, 0], dtype=torch.int32)),
        ("prefix_len", torch.zeros(3)),
        ("num_nodes", torch.tensor([1, 34, 0], dtype=torch.int32)),
        ("num_nodes", torch.tensor([1, -1, 0], dtype=torch.int32)),
        ("ancestors", torch.zeros(3, 33, 1, dtype=torch.int32).view(torch.uint32)),
        ("ancestors", torch.zeros(3, 33, 2, dtype=torch.int32)),
    ],
)
def test_bad_tensors_are_refused(field, value):
    with pytest.raises(ArgumentError, match=field if field != "prefix_len" else "prefix_len|rows"):
        attend(replace(small_case(), **{field: value}))


@pytest.mark.parametrize("page", [-1, -(2**31), 12, 2**25 + 1])
def test_a_used_page_that_does_not_exist_is_refused_and_others_are_not_looked_at(page):
    case = small_case()
    table = case.block_table.clone()
    table[0, 2:], table[1, 1:], table[2] = page, page, page  # 79 keys, 33 keys, a stream that takes no part
    assert torch.equal(attend(replace(case, block_table=table))[0], attend(case)[0])
    table[0, 1] = page
    with pytest.raises(ArgumentError, match="block_table"):
        attend(replace(case, block_table=table))


@pytest.mark.parametrize("options", [{"impl": "best"}, {"scale": 0.0}, {"scale": float("nan")}, {"latent_dim": 33}])
def test_bad_options_are_refused(options):
    case = small_case()
    with pytest.raises(ArgumentError, match=next(iter(options))):
        verify_attention(*case.tensors, **({"scale": SCALE, "latent_dim": 24} | options))


@pytest.mark.parametrize("impl", ["naive", "mma"])
def test_a_kernel_needs_a_gpu(impl):
    with pytest.raises(UnsupportedDevice, match=impl):
        attend(small_case(), impl=impl)


def test_the_choice_of_a_kernel():
    bf16, half = torch.bfloat16, torch.float16
    assert choose_impl(None, bf16, 512, 64) == "reference"
    assert choose_impl("sm_120a", bf16, 512, 64) == "mma"
    assert choose_impl("sm_80", half, 512, 64) == "mma"
    assert choose_impl("sm_90a", bf16, 512, 64) == "wgmma"
    assert choose_impl("sm_90a", torch.float32, 512, 64) == "reference"
    assert choose_impl("sm_90a", bf16, 256, 64) == "reference"
    assert choose_impl("sm_75", bf16, 512, 64) == "reference"


def test_the_fake_kernel_gives_shapes_and_dtypes():
    with FakeTensorMode():
        q = torch.empty(2, 33, 8, 576, dtype=torch.bfloat16, device="cuda")
        pages = torch.empty(9, 64, 576, dtype=torch.bfloat16, device="cuda")
        table = torch.empty(2, 4, dtype=torch.int32, device="cuda")
        ints = torch.empty(2, dtype=torch.int32, device="cuda")
        words = torch.empty(2, 33, 2, dtype=torch.uint32, device="cuda")
        o, lse = _op(q, pages, table, ints, words, ints, SCALE, 512, "mma", False)
    assert (o.shape, o.dtype) == ((2, 33, 8, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 33, 8), torch.float32)


def test_cost_counts_keys_once_and_queries_on_all_of_them():
    cost = verify_attention_cost(1, [4096], 64)
    assert cost.flops == 2 * 64 * 4097 * (576 + 512)
    assert cost.bytes == 2 * (4097 * 576 + 64 * (576 + 512)) + 4 * 64
    two = verify_attention_cost(33, [100, 200], 8)
    assert two == verify_attention_cost(33, [100], 8) + verify_attention_cost(33, [200], 8)
