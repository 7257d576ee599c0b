"""The small ops of a decoder layer in plain torch: norms, the router, products of a few rows."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kdlab.checks import check_float
from kdlab.kernels.library_linear import under_autocast
from kdlab.kernels.mla import compute_dtype
from kdlab.kernels.reference.ops import rms_norm


def add_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + update (x itself without one) and its RMSNorm; see `kdlab.kernels.add_norm`."""
    check_float("eps", eps, minimum=0.0)
    total = x if update is None else x + update
    return total, rms_norm(total, weight, eps)


def router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    k: int,
    scale: float,
    *,
    normalize: bool = True,
    groups: tuple[int, int] = (1, 1),
    used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return expert ids [T, k] i32 and weights [T, k], as DeepseekV3's gate does; see `kdlab.kernels.router`.

    Args:
        x: [T, D] float.
        weight: [E, D] in x's dtype.
        bias: [E] in the wide dtype.
        k: experts a row.
        scale: factor of the weights.
        normalize: divide the weights of a row by their sum first.
        groups: into how many groups neighbouring experts fall, and how many of these are open to a row.
        used: [T] bool; the other rows get -1 and 0.
    """
    check_float("scale", scale)
    wide = compute_dtype(x.dtype)
    scores = _product(x.to(wide), weight.to(wide)).sigmoid()
    choice = _open_groups(scores + bias, *groups)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, chosen)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights, chosen = weights * scale, chosen.int()
    if used is None:
        return chosen, weights
    return chosen.where(used[:, None], -1), weights.where(used[:, None], 0.0)


def _open_groups(choice: Tensor, num_groups: int, num_open: int) -> Tensor:
    """Hide [T, E] scores outside the best groups; a group counts by the sum of its best two."""
    if num_groups == num_open:
        return choice
    groups = choice.unflatten(-1, (num_groups, -1))
    best = groups.topk(2, dim=-1).values.sum(-1).topk(num_open, dim=-1).indices
    closed = torch.ones(groups.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, False)
    return groups.masked_fill(closed[..., None], -torch.inf).flatten(1)


def skinny_linear(x: Tensor, weight: Tensor, *, gated: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Return x W^T [..., N] of x [..., K] and W [N, K] in `dtype` (x's when None), or silu(x G^T) * (x U^T)."""
    y = F.linear(x, weight) if dtype in (None, x.dtype) else _product(x.to(dtype), weight.to(dtype))
    return gate_halves(y) if gated else y


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T in the dtype that both were given, which autocast would round."""
    if not under_autocast(x):
        return F.linear(x, weight)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, weight)


def gate_halves(y: Tensor) -> Tensor:
    """Return silu(g) * u [..., N/2] of y [..., N], whose halves are g and u."""
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up
