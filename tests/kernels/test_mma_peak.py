"""The kernel of nothing but mma.sync: its count of operations, and that it reaches what the card can."""

import pytest
import torch

from kdlab.errors import ArgumentError, NotSupported, UnsupportedDevice
from kdlab.kernels.jit import num_sms
from kdlab.kernels.mma_peak import mma_peak, mma_peak_cost


def test_cost_counts_every_product():
    assert mma_peak_cost(10, 132).flops == 132 * 8 * 16 * 10 * 2 * 16 * 8 * 16
    assert mma_peak_cost(20, 132).flops == 2 * mma_peak_cost(10, 132).flops


def test_bad_arguments():
    with pytest.raises(NotSupported, match="dtype"):
        mma_peak(torch.zeros(8), 1, dtype=torch.float32)
    with pytest.raises(ArgumentError, match="rounds"):
        mma_peak(torch.zeros(8), 0)
    with pytest.raises(UnsupportedDevice):
        mma_peak(torch.zeros(8), 1)


@pytest.mark.gpu
def test_every_thread_writes_a_finite_sum_that_grows_with_the_rounds():
    device = torch.device("cuda")
    few, many = (torch.full((num_sms(device) * 256,), torch.nan, device=device) for _ in range(2))
    mma_peak(few, 1)
    mma_peak(many, 64)
    assert few.isfinite().all()
    torch.testing.assert_close(many, 64 * few, rtol=1e-2, atol=1e-2)
    with pytest.raises(ArgumentError, match="sums"):
        mma_peak(few[:-1], 1)
