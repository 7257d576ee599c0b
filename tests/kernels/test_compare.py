"""The comparison itself: it must find what it is there for."""

import pytest
import torch

from tests.kernels.compare import (
    assert_faults_are_found,
    assert_within_budget,
    broken_twins,
    budget_share,
    canary,
    guarded_allocations,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def results(dtype, rows=70, columns=512):
    """A product of [rows, 64] and [64, columns]: exact, in plain torch, and in another order of summation."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, 64, generator=generator).to(dtype)
    b = torch.randn(64, columns, generator=generator).to(dtype)
    exact = a.double() @ b.double()
    ours = sum(a[:, i : i + 16].float() @ b[i : i + 16].float() for i in range(0, 64, 16))
    return ours.to(dtype), exact, a @ b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_right_result_passes_and_every_broken_twin_fails(dtype):
    out, exact, plain = results(dtype)
    assert_within_budget(out, exact, plain)
    assert 0 < budget_share(out, exact, plain) <= 1
    assert_faults_are_found(out, exact, plain)
    assert [name for name, _ in broken_twins(out)] == ["zeroed tile", "NaN", "wrong row"]


@pytest.mark.parametrize("fault", ["zeroed tile", "NaN", "wrong row", "inf", "scale"])
def test_each_fault_alone_is_found_and_named(fault):
    out, exact, plain = results(torch.bfloat16)
    twins = dict(broken_twins(out)) | {"inf": out.clone(), "scale": out.clone()}
    twins["inf"][3, 5] = torch.inf
    twins["scale"][69] *= 1.02
    message = {"NaN": "NaN at 1 wrong places", "inf": r"\+inf at 1 wrong places, first \(3, 5\)"}
    with pytest.raises(AssertionError, match=message.get(fault, "rows over the budget")):
        assert_within_budget(twins[fault], exact, plain, "product")


def test_one_small_row_counts_like_a_large_one():
    out, exact, plain = results(torch.float32)
    scale = torch.ones(70, 1)
    scale[7] = 1e-6
    scaled = out * scale
    assert_within_budget(scaled, exact * scale, plain * scale)
    scaled[7, 0] += 1e-9 * exact.abs().max()
    with pytest.raises(AssertionError, match=r"first row \(7,\)"):
        assert_within_budget(scaled, exact * scale, plain * scale)


def test_special_values_must_stand_where_exact_has_them():
    exact = torch.tensor([[1.0, -torch.inf, torch.nan]], dtype=torch.float64)
    assert_within_budget(exact.float(), exact, exact.float())
    for wrong in ([1.0, 0.0, torch.nan], [1.0, torch.inf, torch.nan], [1.0, -torch.inf, 0.0]):
        with pytest.raises(AssertionError, match="wrong places"):
            assert_within_budget(torch.tensor([wrong]), exact, exact.float())


def test_a_zero_row_must_stay_zero():
    zero = torch.zeros(2, 8)
    assert_within_budget(zero, zero.double(), zero)
    with pytest.raises(AssertionError, match=r"first row \(1,\)"):
        assert_within_budget(torch.tensor([[0.0] * 8, [1e-30] + [0.0] * 7]), zero.double(), zero)


def test_exact_must_be_float64():
    with pytest.raises(AssertionError, match="float64"):
        assert_within_budget(torch.ones(2), torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.int64, torch.uint8, torch.bool], ids=str)
def test_canaries(dtype):
    view, check = canary((3, 5), dtype, "cpu")
    assert (view.shape, view.dtype, view.is_contiguous(), view.data_ptr() % 16) == ((3, 5), dtype, True, 0)
    unwritten = view.isnan() if dtype.is_floating_point else view == torch.tensor(-1).to(dtype)
    assert unwritten.all() or dtype == torch.bool
    view.fill_(1)
    check()
    everything = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
    first = view.storage_offset() * dtype.itemsize
    for index, side in ((first - 1, "before"), (first + 15 * dtype.itemsize, "behind")):
        kept, everything[index] = int(everything[index]), 0
        with pytest.raises(pytest.fail.Exception, match=f"1 bytes {side}"):
            check()
        everything[index] = kept
    check()


def test_guarded_allocations():
    with guarded_allocations() as check:
        with pytest.raises(AssertionError, match="nothing"):
            check()
        out = torch.empty(4, 4)
        same = torch.empty_like(out), torch.zeros(3), torch.full((2,), 7.0), out.new_empty(5)
        check()
        assert out.isnan().all()
        assert (same[1].tolist(), same[2].tolist()) == ([0, 0, 0], [7, 7])
        out.as_strided((1,), (1,), out.storage_offset() + 16).fill_(0)
        with pytest.raises(pytest.fail.Exception, match="bytes behind"):
            check()
    assert torch.empty(1).storage_offset() == 0
