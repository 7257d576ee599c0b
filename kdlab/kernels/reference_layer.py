"""The small ops of a decoder layer in plain torch: norms, the router, products of a few rows."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kdlab.kernels.reference import compute_dtype, rms_norm


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + update (x itself without one) and its RMSNorm; see `kdlab.kernels.add_norm`."""
    total = x if update is None else x + update
    return total, rms_norm(total, weight, eps)


def router(
    x: Tensor, weight: Tensor, bias: Tensor, k: int, scale: float, *, normalize: bool = True, used: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return expert ids [T, k] i32 and weights [T, k], as DeepseekV3's gate without groups; see `kdlab.kernels.router`.

    Args:
        x: [T, D] float.
        weight: [E, D] in x's dtype.
        bias: [E] in the wide dtype.
        k: experts a row.
        scale: factor of the weights.
        normalize: divide the weights of a row by their sum first.
        used: [T] bool; the other rows get -1 and 0.
    """
    wide = compute_dtype(x.dtype)
    scores = F.linear(x.to(wide), weight.to(wide)).sigmoid()
    chosen = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, chosen)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights, chosen = weights * scale, chosen.int()
    if used is None:
        return chosen, weights
    return chosen.where(used[:, None], -1), weights.where(used[:, None], 0.0)


def skinny_linear(x: Tensor, weight: Tensor, *, gated: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Return x W^T [..., N] of x [..., K] and W [N, K] in `dtype` (x's when None), or silu(x G^T) * (x U^T)."""
    y = F.linear(x, weight) if dtype in (None, x.dtype) else F.linear(x.to(dtype), weight.to(dtype))
    if not gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up
