"""A kernel that does nothing but mma.sync: the ceiling of the portable tensor-core kernels on the card at hand."""

import torch
from torch import Tensor

from kdlab.checks import check_int
from kdlab.errors import NotSupported
from kdlab.kernels.constants import DTYPE_DEFINE, MMA_DTYPES
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit import Build, kernel, num_sms

_THREADS, _CHAINS, _FLOPS = 256, 16, 4096  # products of 16 x 8 x 16


def _build(dtype: torch.dtype) -> Build:
    return Build("mma_peak.cu", (("DTYPE", DTYPE_DEFINE[dtype]),))


BUILDS = tuple(map(_build, MMA_DTYPES))


def mma_peak(sums: Tensor, rounds: int, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Run `rounds` of products on every multiprocessor.

    Args:
        sums: [at least 256 times the multiprocessors] f32 on the GPU, overwritten with what comes out.
        rounds: 1 at least; 2,000 take about a tenth of a millisecond.
        dtype: bf16 or f16.

    Raises:
        UnsupportedDevice: no GPU. NotSupported: another dtype.
    """
    if dtype not in MMA_DTYPES:
        raise NotSupported("dtype", "bfloat16 or float16", dtype)
    rounds = check_int("rounds", rounds, minimum=1)
    program = kernel(_build(dtype), "mma_peak", sums.device)
    check_int("sums", sums.numel(), minimum=num_sms(sums.device) * _THREADS)
    program.launch(num_sms(sums.device), _THREADS, sums, rounds)


def mma_peak_cost(rounds: int, multiprocessors: int) -> Cost:
    """Return the operations of one call; the bytes are those of `sums`."""
    warps = multiprocessors * _THREADS // 32
    return Cost(4 * multiprocessors * _THREADS, warps * _CHAINS * _FLOPS * rounds)
