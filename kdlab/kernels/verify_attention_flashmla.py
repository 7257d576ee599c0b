"""FlashMLA over the prefix, our kernel over the tree, merged by log-sum-exp: FlashMLA knows no tree mask."""

import importlib
from types import ModuleType

from torch import Tensor

from kdlab.errors import NotSupported, UnsupportedDevice
from kdlab.kernels.constants import MMA_DTYPES
from kdlab.kernels.jit import HOPPER, arch_of, kernel
from kdlab.kernels.verify_attention_mma import MERGE_THREADS, build_merge, run_mma_tail


def load_flashmla() -> ModuleType:
    """Import the package `flash_mla`.

    Raises:
        UnsupportedDevice: it is missing, or lacks the dense kernel.
    """
    try:
        package = importlib.import_module("flash_mla")
        importlib.import_module("flash_mla._loader").get_ops(True)
    except (ImportError, RuntimeError, OSError) as error:
        raise UnsupportedDevice(f"impl='flashmla' needs the dense kernel of sgl-flash-mla: {error}") from error
    return package


def run_flashmla(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    scale: float,
    fixed_split: bool,
    o: Tensor,
    lse: Tensor,
) -> None:
    """Fill o and lse; shapes as in `verify_attention`, all tensors contiguous, C 512 and R 64.

    FlashMLA makes its schedule on the GPU, anew at every call, so there is no host synchronisation, and a captured
    graph follows the lengths. It trusts them, so they are cut to what the block table holds, and pages to those there
    are.

    Raises:
        NotSupported: fixed_split (FlashMLA's splits follow the batch), or another dtype than bf16 and f16.
        UnsupportedDevice: no Hopper GPU, or the package is missing.
    """
    if arch_of(q.device) not in HOPPER:
        raise UnsupportedDevice(f"impl='flashmla' is for {', '.join(HOPPER)}, this GPU is {arch_of(q.device)}")
    if fixed_split:
        raise NotSupported("fixed_split", "False for impl='flashmla', whose splits follow the batch", fixed_split)
    if q.dtype not in MMA_DTYPES:
        raise NotSupported("q", "bfloat16 or float16 for impl='flashmla'", q.dtype)
    package = load_flashmla()
    capacity = block_table.shape[1] * pages.shape[1]
    prefix_len = prefix_len.clamp(0, capacity)
    table = block_table.clamp(0, pages.shape[0] - 1)
    o_prefix, lse_prefix = package.flash_mla_with_kvcache(
        q, pages.unsqueeze(2), table, prefix_len, o.shape[-1], package.get_mla_metadata()[0],
        softmax_scale=scale, causal=False, use_legacy=True,
    )  # fmt: skip
    parts = run_mma_tail((q, pages, block_table, prefix_len, ancestors, num_nodes), scale, o, lse)
    num_streams, num_rows, num_heads, _ = q.shape
    grid = (-(-num_rows * num_heads * 32 // MERGE_THREADS), num_streams)
    merge = kernel(build_merge(q.dtype), "verify_merge_prefix", q.device)
    tensors = (o_prefix, lse_prefix.contiguous(), *parts, prefix_len, num_nodes, o, lse)
    merge.launch(grid, MERGE_THREADS, *tensors, num_rows, num_heads, capacity)
