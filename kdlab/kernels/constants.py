"""What the CUDA sources and their callers agree on, said once."""

import torch

PAGE_SIZE = 64
"""Rows of a page of the cache: FlashMLA's, so that its kernel and ours read the cache in place."""

DTYPE_DEFINE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The value of -DDTYPE, which makes `Scalar` in csrc/common.cuh."""

MMA_DTYPES = (torch.bfloat16, torch.float16)
"""What the tensor cores multiply."""
