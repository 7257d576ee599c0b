"""What the ops over rows of logits share: which tensors the kernels read, and how many blocks share a row."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_float_tensor
from kdlab.errors import ShapeError, UnsupportedDevice
from kdlab.kernels.constants import DTYPE_DEFINE
from kdlab.kernels.jit import Kernel

DTYPES = tuple(DTYPE_DEFINE)
"""What the kernels read."""
MAX_CLUSTER = 8
"""Blocks of a row, as in csrc/logits.cuh."""
THREADS, CHUNK_BYTES = 512, 40960
"""Threads of a block, and bytes that it reads of a row at once."""


def constants(dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """Return the defines of a source that includes csrc/logits.cuh."""
    return ("DTYPE", DTYPE_DEFINE[dtype]), ("BLOCK_THREADS", THREADS), ("CHUNK_BYTES", CHUNK_BYTES)


def count_chunks(num_ids: int, item_bytes: int) -> int:
    """Return how many chunks a row is cut into, which are what its blocks share."""
    return max(-(-num_ids * item_bytes // CHUNK_BYTES), 1)


def cluster_size(
    kernel: Kernel, num_rows: int, num_chunks: int, shared_bytes: Callable[[int], int], *, least: int = 1
) -> int:
    """Return how many blocks share a row: as many as still lets all rows run at once, 8 or one a chunk at most.

    Args:
        kernel: what runs over the rows.
        num_rows: of the launch.
        num_chunks: of a row.
        shared_bytes: dynamic shared memory of a block, given the blocks of a row.
        least: blocks that a row gets in any case, if it has as many chunks.

    Returns:
        1 before Hopper, which knows no clusters.
    """
    if torch.cuda.get_device_capability(kernel.device) < (9, 0):
        return 1
    for cluster in (min(num_chunks, MAX_CLUSTER), 4, 2):
        if 1 < cluster <= num_chunks and (
            cluster <= least or _most_rows(kernel, cluster, shared_bytes(cluster)) >= num_rows
        ):
            return cluster
    return 1


@functools.lru_cache(maxsize=256)
def _most_rows(kernel: Kernel, cluster: int, shared_bytes: int) -> int:
    return kernel.max_clusters(THREADS, shared_bytes, cluster)


def runs_kernel(op: str, logits: Tensor, impl: str) -> bool:
    """Say whether the kernel runs rather than the reference, after a look at what the kernel can read.

    Raises:
        ArgumentError: an unknown impl. UnsupportedDevice: "cuda" for tensors on another device.
        ShapeError: a dtype or layout that the kernel does not read.
    """
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    check_float_tensor("logits", logits)
    if impl == "cuda" and not logits.is_cuda:
        raise UnsupportedDevice(f"{op}: impl 'cuda' needs CUDA tensors, logits are on {logits.device}")
    if impl == "reference" or not logits.is_cuda:
        return False
    if logits.dtype not in DTYPES:
        raise ShapeError("logits", "float32, bfloat16 or float16 on a GPU (or impl='reference')", logits.dtype)
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ShapeError("logits", "the values of a row side by side", f"strides {logits.stride()}")
    return True
