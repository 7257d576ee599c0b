"""What the ops over rows of logits share: which tensors the kernels read, and how many blocks share a row."""

import torch
from torch import Tensor

from kdlab.checks import check_choice
from kdlab.errors import ShapeError, UnsupportedDevice
from kdlab.kernels.constants import DTYPE_DEFINE

DTYPES = tuple(DTYPE_DEFINE)
"""What the kernels read."""
MAX_CLUSTER = 8
"""Blocks of a row, as in csrc/logits.cuh."""
THREADS, CHUNK_BYTES = 512, 40960
"""Threads of a block, and bytes that it reads of a row at once."""


def constants(dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """Return the defines of a source that includes csrc/logits.cuh."""
    return ("DTYPE", DTYPE_DEFINE[dtype]), ("BLOCK_THREADS", THREADS), ("CHUNK_BYTES", CHUNK_BYTES)


def cluster_size(num_ids: int, item_bytes: int, device: torch.device) -> int:
    """Return how many blocks share a row: one a chunk, 8 at most, one before Hopper, which knows no clusters."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return 1
    return min(max(-(-num_ids * item_bytes // CHUNK_BYTES), 1), MAX_CLUSTER)


def runs_kernel(op: str, logits: Tensor, impl: str) -> bool:
    """Say whether the kernel runs rather than the reference, after a look at what the kernel can read.

    Raises:
        ArgumentError: an unknown impl. UnsupportedDevice: "cuda" for tensors on another device.
        ShapeError: a dtype or layout that the kernel does not read.
    """
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    if impl == "cuda" and not logits.is_cuda:
        raise UnsupportedDevice(f"{op}: impl 'cuda' needs CUDA tensors, logits are on {logits.device}")
    if impl == "reference" or not logits.is_cuda:
        return False
    if logits.dtype not in DTYPES:
        raise ShapeError("logits", "float32, bfloat16 or float16 on a GPU (or impl='reference')", logits.dtype)
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ShapeError("logits", "the values of a row side by side", f"strides {logits.stride()}")
    return True
