"""Every op in plain torch, at any float dtype and on any device: the specification of the kernels."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square, then multiply by the weight.

    Args:
        x: [..., D] float.
        weight: [D] float, in x's dtype.
        eps: added to the mean square.

    Returns:
        [..., D] in x's dtype: the mean in float32 (float64 for float64), rounded to x's dtype before the weight.
    """
    wide = x.to(compute_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums that must not lose bits: float32, or float64 where the data is float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
