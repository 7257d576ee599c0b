"""Products by torch's library as a batch of smaller ones, where it is uneven in the size of a single one."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kdlab.checks import check_float_tensor, check_shape
from kdlab.errors import ShapeError
from kdlab.kernels.constants import MMA_DTYPES
from kdlab.kernels.jit.layouts import by_layout


class Cut(NamedTuple):
    """Into how many equal parts the rows or the outputs of a product go; at most one of the two is cut."""

    rows: int = 1
    features: int = 1


WHOLE = Cut()
_MEASURED: dict[tuple[int, int], tuple[tuple[range, Cut], ...]] = {
    (2112, 7168): (
        (range(65, 73), Cut(features=11)),
        (range(129, 137), Cut(features=33)),
        (range(401, 1 << 30), Cut(rows=2)),
    ),
    (1536, 1536): ((range(257, 1 << 30), Cut(features=6)),),
    (4608, 7168): ((range(41, 129), Cut(features=18)),),
    (7168, 256): ((range(257, 1 << 30), Cut(features=14)),),
}
"""By outputs and inputs, for which numbers of rows a cut is quicker: q_a with kv_a, q_b, gate_up of a dense layer and
of the drafter, the shared expert's down_proj, of one rank of 8. On an H200 (CUDA 13.0) q_a takes 14.1 us whole and 13.0
in parts at 65 rows, 15.4 and 14.1 at 132, 45.2 and 20.9 at 448, 34.7 and 23.7 at 528, 41 to 48 and 23.9 at 544, 44.1
and 41.6 at 1,056; q_b 8.2 and 6.7 at 528; gate_up 23.9 and 19.8 at 64, down_proj 7.9 and 7.3 at 528."""


def find_cut(rows: int, features: int, inputs: int) -> Cut:
    """Return how a product of [rows, inputs] and [features, inputs] is cut: as measured, WHOLE elsewhere."""
    cuts = (cut for some, cut in _MEASURED.get((features, inputs), ()) if rows in some and rows % cut.rows == 0)
    return next(cuts, WHOLE)


def library_parts(x: Tensor, weight: Tensor, parts: int, *, out: Tensor | None = None) -> Tensor:
    """Return products over neighbouring inputs, which add up to x W^T, as cuBLAS makes them in one launch.

    For one product of few features cuBLAS makes too few blocks.

    Args:
        x: [T, K] bfloat16 or float16 on a GPU; rows may be strided.
        weight: [N, K] in x's dtype.
        parts: equal ones, which divide K.
        out: [parts, T, N] float32 to be written; a new tensor when None.

    Returns:
        [parts, T, N] float32.
    """
    rows, columns = (matrix.unflatten(1, (parts, -1)).transpose(0, 1) for matrix in (x, weight))
    return torch.bmm(rows, columns.mT, torch.float32, out=out)


def library_linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x W^T as cuBLAS makes it, in one launch.

    Args:
        x: [T, K] float on a GPU.
        weight: [N, K] in x's dtype.
        out: [T, N] in x's dtype to be written, contiguous; a new tensor when None.

    Returns:
        [T, N] in x's dtype; without `out` under autocast in autocast's, as torch's own. Parts sum in another order than
        the whole, as another number of rows does.

    Raises:
        ShapeError: the arguments do not fit one another.
    """
    if torch.compiler.is_compiling():  # whose number of rows may be a symbol
        cut = WHOLE
    else:
        cut = _checked_cut(x, weight, out)
        wants_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        # Transforms of torch.func know no product that is written into parts.
        if wants_gradient or under_autocast(x) or torch._C._are_functorch_transforms_active():
            cut = WHOLE
    if cut == WHOLE:
        return F.linear(x, weight) if out is None else torch.mm(x, weight.mT, out=out)
    y = x.new_empty(len(x), len(weight)) if out is None else out
    if cut.rows > 1:
        x_parts, y_parts = (matrix.unflatten(0, (cut.rows, -1)) for matrix in (x, y))
        torch.bmm(x_parts, weight.mT.expand(cut.rows, -1, -1), out=y_parts)
    else:
        parts = weight.unflatten(0, (cut.features, -1)).mT
        torch.bmm(x.expand(cut.features, -1, -1), parts, out=y.unflatten(1, (cut.features, -1)).transpose(0, 1))
    return y


def under_autocast(x: Tensor) -> bool:
    """Say whether torch's products of x choose their own dtype now; what is no tensor has none."""
    device = getattr(getattr(x, "device", None), "type", None)
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


@by_layout
def _checked_cut(x: Tensor, weight: Tensor, out: Tensor | None) -> Cut:
    """Check the arguments of `library_linear`; return how its product is cut."""
    sizes = check_shape("x", x, ["T", "K"])
    check_float_tensor("x", x)
    features = check_shape("weight", weight, ["N", sizes["K"]])["N"]
    others = {"weight": weight}
    if out is not None:
        check_shape("out", out, [sizes["T"], features])
        others["out"] = out
    for name, other in others.items():
        if other.dtype != x.dtype or other.device != x.device:
            raise ShapeError(name, f"{x.dtype} on {x.device}, as x", f"{other.dtype} on {other.device}")
    return find_cut(sizes["T"], features, sizes["K"]) if x.dtype in MMA_DTYPES else WHOLE
