"""What the CUDA sources and their callers agree on, said once."""

import torch

PAGE_SIZE = 64
"""Rows of a page of the cache: FlashMLA's, so that its kernel and ours read the cache in place."""

DTYPE_DEFINE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The value of -DDTYPE, which makes `Scalar` in csrc/common.cuh."""

MMA_DTYPES = (torch.bfloat16, torch.float16)
"""What the tensor cores multiply."""


def expert_constants(
    dtype: torch.dtype, scale: torch.dtype | None, width: int, inner: int, num_experts: int
) -> dict[str, str | int]:
    """Return what all sources of moe_int4 are told of its shapes and dtypes.

    Args:
        dtype: of the rows, and of dense weights.
        scale: of INT4 weights' scales, None for dense weights.
        width: D.
        inner: I.
        num_experts: E.
    """
    return {
        "DTYPE": DTYPE_DEFINE[dtype],
        "SCALE_DTYPE": DTYPE_DEFINE[dtype if scale is None else scale],
        "MODEL_WIDTH": width,
        "INNER_WIDTH": inner,
        "NUM_EXPERTS": num_experts,
    }
