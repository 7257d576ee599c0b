"""router: which k of E experts each row goes to, and with which weights."""

import functools

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_float_tensor, check_int, check_shape
from kdlab.errors import ArgumentError, NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import jit, reference
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit.layouts import by_layout
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.mla import compute_dtype
from kdlab.kernels.router_gate import gate_parts
from kdlab.kernels.skinny_linear import skinny_linear_cost

_WARP = 32
_MAX_EXPERTS = 1024
_EXPERTS_A_WARP = 128  # as in the .cu
_ALIGNMENT = 16  # of the bias, which is read in 16-byte words


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
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Choose k experts a row by their biased sigmoid scores; the weights are the unbiased scores of those chosen.

    With the kernels a row's ids and weights do not depend on the other rows, nor on how many there are up to
    `router_gate.MAX_ROWS` where `has_gate`, or as in `skinny_linear`; for more rows the library sums the products, in
    other ways for other numbers of rows. The bias is read before the kernel ahead in the stream has ended: nothing may
    have written it just before.

    Args:
        x: [T, D] float.
        weight: [E, D] in x's dtype; products are summed in float32 (float64 for float64) and not rounded.
        bias: [E] f32 (f64 for float64), takes part in the choice only.
        k: experts a row.
        scale: factor of the weights.
        normalize: divide the weights of a row by their sum first.
        groups: into how many groups neighbouring experts fall, and how many of these, the best by the sum of their best
            two, are open to a row.
        used: [T] bool, rows in use; None for all.
        impl: "auto" (the kernels for CUDA tensors where `has_kernel` says so, the reference for others), "cuda" or
            "reference".

    Returns:
        expert_ids [T, k] i32, best first, equal ones by the smaller id, -1 in rows that are not in use, and weights
        [T, k] f32 (f64 for float64), 0 there.

    Raises:
        ShapeError: the arguments do not fit one another. NotSupported: impl "cuda" for what the kernels do not take.
        UnsupportedDevice: "cuda" for tensors on another device. ArgumentError: an unknown impl, k above E, or
            groups that E or k do not fit.
    """
    if not _runs_kernel(x, weight, bias, used, k, groups, impl):
        return reference.router(x, weight, bias, k, scale, normalize=normalize, groups=groups, used=used)
    parts = gate_parts(x, weight, impl)
    return _router_choose(parts, bias, None if used is None else used.contiguous(), k, scale, normalize)


@by_layout
def _runs_kernel(
    x: Tensor, weight: Tensor, bias: Tensor, used: Tensor | None, k: int, groups: tuple[int, int], impl: str
) -> bool:
    """Check the arguments of `router`; say whether the kernels run."""
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    if impl == "cuda" and not x.is_cuda:
        raise UnsupportedDevice(f"router: impl 'cuda' needs CUDA tensors, x is on {x.device}")
    sizes = check_shape("x", x, ["T", "D"])
    check_float_tensor("x", x)
    experts = check_shape("weight", weight, ["E", sizes["D"]])["E"]
    check_shape("bias", bias, [experts])
    check_int("k", k, minimum=1, maximum=experts)
    if used is not None:
        check_shape("used", used, [sizes["T"]])
        if used.dtype != torch.bool or used.device != x.device:
            raise ShapeError("used", f"bool on {x.device}, as x", f"{used.dtype} on {used.device}")
    for name, tensor, dtype in (("weight", weight, x.dtype), ("bias", bias, compute_dtype(x.dtype))):
        if tensor.dtype != dtype or tensor.device != x.device:
            raise ShapeError(name, f"{dtype} on {x.device}", f"{tensor.dtype} on {tensor.device}")
    _check_groups(groups, experts, k)
    runs = has_kernel(experts, k, x.dtype, groups)
    if impl == "cuda" and not runs:
        raise NotSupported("router", f"k to {_WARP} of {_MAX_EXPERTS} open experts, an f32 bias", (k, experts, groups))
    return impl != "reference" and x.is_cuda and runs


def _check_groups(groups: tuple[int, int], num_experts: int, k: int) -> None:
    number, opened = groups
    fits = number >= 1 and 1 <= opened <= number and num_experts % number == 0
    each = num_experts // number if fits else 0
    if not fits or k > opened * each or (opened < number and each < 2):
        wanted = f"equal groups of {num_experts} experts, by whose best two are chosen so many that k = {k} are open"
        raise ArgumentError("groups", wanted, groups)


def has_kernel(num_experts: int, k: int, dtype: torch.dtype, groups: tuple[int, int]) -> bool:
    """Say whether the kernel chooses k of so many experts for rows of this dtype; `groups` as in `router`."""
    in_float32 = compute_dtype(dtype) == torch.float32
    return k <= _WARP and num_experts <= _MAX_EXPERTS and in_float32 and groups[0] == groups[1]


def router_cost(num_rows: int, width: int, num_experts: int, k: int, itemsize: int = 2) -> Cost:
    """Return the cost of `num_rows` rows: their values and the weights once, ids and weights of the k chosen."""
    product = skinny_linear_cost(num_rows, num_experts, width, itemsize=itemsize)
    return Cost((num_experts + num_rows) * width * itemsize + 4 * num_experts + 8 * k * num_rows, product.flops)


@functools.lru_cache(maxsize=16)
def build(num_experts: int, k: int, summands: int) -> jit.Build:
    """Return what is compiled for the best k of so many experts, by logits that are sums of so many."""
    return jit.Build("router.cu", (("NUM_EXPERTS", num_experts), ("CHOSEN", k), ("SUMMANDS", summands)))


@cuda_op("router_choose")
def _router_choose(
    parts: Tensor, bias: Tensor, used: Tensor | None, k: int, scale: float, normalize: bool
) -> tuple[Tensor, Tensor]:
    summands, rows, experts = parts.shape
    ids, weights = parts.new_empty(rows, k, dtype=torch.int32), parts.new_empty(rows, k)
    in_place = bias.is_contiguous() and bias.data_ptr() % _ALIGNMENT == 0
    if not in_place:
        bias = bias.clone(memory_format=torch.contiguous_format)
    if rows:
        kernel = jit.kernel(build(experts, k, summands), "router_choose", parts.device)
        args = (parts, bias, used, ids, weights, int(normalize), float(scale))
        # The bias is read before the wait for the kernel ahead, which must not be the one that copies it.
        kernel.launch(rows, -(-experts // _EXPERTS_A_WARP) * _WARP, *args, overlap=in_place)
    return ids, weights


@_router_choose.register_fake
def _(parts: Tensor, bias: Tensor, used: Tensor | None, k: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (parts.shape[1], k)
    return parts.new_empty(shape, dtype=torch.int32), parts.new_empty(shape)


BUILDS = tuple(build(384, 8, summands) for summands in (1, 4, 8, 16))
