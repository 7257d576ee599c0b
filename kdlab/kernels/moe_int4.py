"""moe_int4: the experts of some rows, INT4 or dense, grouped by expert on the device.

`moe_checks` looks at the arguments, `moe_builds` says which kernels run (`moe_path`) and what they are compiled with,
`moe_launch` launches them.
"""

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_float
from kdlab.config import INT4_GROUP
from kdlab.errors import NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import jit
from kdlab.kernels.constants import DTYPE_DEFINE
from kdlab.kernels.cost import Cost
from kdlab.kernels.experts import DenseExperts, PackedExperts
from kdlab.kernels.jit.layouts import by_layout
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.mla import compute_dtype
from kdlab.kernels.moe_builds import moe_path
from kdlab.kernels.moe_checks import check_moe
from kdlab.kernels.moe_launch import RUN, Routed, Shared
from kdlab.kernels.reference import moe_experts

_ALIGNMENT = 16
_MAX_EXPERTS, _MAX_PICKS = 1024, 2**21  # shared memory for the counts; 32-bit units of work


def moe_int4(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    experts: PackedExperts | DenseExperts,
    *,
    shared: DenseExperts | None = None,
    impl: str = "auto",
) -> Tensor:
    """Run each row through its k experts (SwiGLU), and the shared one if given, and add the weighted results.

    A row's result does not depend on what the other rows are, bit for bit. It depends on how many they are, as other
    kernels, with sums in another order, run (`moe_builds.moe_path`) up to FEW_ROWS rows of narrow INT4 experts, from
    MANY_ROWS rows on (wide experts MANY_ROWS_WHOLE), where torch multiplies for the shared expert, in other ways for
    other numbers of rows, and from WIDE_ROWS on. On a GPU nothing waits for the host. Graphs with MANY_ROWS rows and a
    shared expert, captured by one thread, have one workspace of torch's for it: no two of them may run at once.

    Args:
        x: [T, D] float32, bfloat16 or float16 (the reference also takes float64).
        expert_ids: [T, k] i32 (or i64); an id outside 0..E-1 is no expert: padding, or another rank's.
        weights: [T, k] float.
        experts: E experts; dense ones in x's dtype, packed ones with scales of any float dtype but float64.
        shared: one dense expert in x's dtype that every row runs through with weight 1; its width may differ.
        impl: "auto" (the kernel for CUDA tensors, the reference for others), "cuda" or "reference".

    Returns:
        [T, D] in x's dtype, summed in float32 in the order of the slots, the shared expert last. From MANY_ROWS rows
        on weights are rounded to x's dtype after their scale, and the summands too, as the reference's are.

    Raises:
        ShapeError: the arguments do not fit one another. NotSupported: D or I that the kernel does not take.
        UnsupportedDevice: "cuda" for tensors on another device. ArgumentError: an unknown impl.
    """
    if not _runs_kernel(x, expert_ids, weights, experts, shared, impl):
        out = _reference(x, expert_ids, weights, experts)
        return out if shared is None else out + _shared_reference(x, shared)
    if expert_ids.dtype != torch.int32:
        expert_ids = expert_ids.long().clamp(-1, experts.num_experts).int()  # 8 bits do not hold the limits
    routed = _tensors(experts)
    alone = (None, None) if shared is None else (shared.gate_up, shared.down)
    return _moe_int4(x.contiguous(), expert_ids.contiguous(), weights.float().contiguous(), *routed, *alone)


def expected_experts(num_rows: float, top_k: int, num_experts: int, correlation: float = 1.0) -> float:
    """Return how many distinct experts rows touch together if each draws its k at random: E (1 - (1 - k / E)^(T^g)).

    Args:
        num_rows: T.
        top_k: k.
        num_experts: E.
        correlation: g, 1 for independent rows; below 1 rows of one text share experts.
    """
    correlation = check_float("correlation", correlation, minimum=0.0, maximum=1.0)
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** (num_rows**correlation))


def moe_int4_cost(
    expert_ids: Tensor,
    width: int,
    inner: int,
    *,
    distinct: float | None = None,
    shared: bool = False,
    packed: bool = True,
    value_bytes: int = 2,
) -> Cost:
    """Return the cost of one call: the weights of the distinct experts once, the rows in and out; 6 D I FLOP a pick.

    Args:
        expert_ids: [T, k] int; ids below 0 are no experts. The distinct ones are counted on the host.
        width: D.
        inner: I.
        distinct: number of distinct experts, such as `expected_experts`; None counts those of `expert_ids`.
        shared: with the shared expert, of the same inner width.
        packed: INT4 with 16-bit scales, or dense.
        value_bytes: bytes of a value of x, and of a dense weight.
    """
    num_rows = expert_ids.shape[0]
    used = expert_ids[expert_ids >= 0]
    experts = float(used.unique().numel()) if distinct is None else distinct
    values = 3 * width * inner
    dense_bytes = values * value_bytes
    expert_bytes = values // 2 + values // INT4_GROUP * 2 if packed else dense_bytes
    weight_bytes = round(experts * expert_bytes) + (dense_bytes if shared else 0)
    picks = used.numel() + (num_rows if shared else 0)
    return Cost(weight_bytes + 2 * num_rows * width * value_bytes + 8 * expert_ids.numel(), 2 * values * picks)


def _reference(x: Tensor, expert_ids: Tensor, weights: Tensor, experts: PackedExperts | DenseExperts) -> Tensor:
    """`moe_experts`, and rows whose ids lie outside 0..E-1 besides: every used pick is a row of its own there."""
    used = (expert_ids >= 0) & (expert_ids < experts.num_experts)
    if used.numel() and bool(used.all()):
        return moe_experts(x, expert_ids, weights, experts)
    row, slot = used.nonzero(as_tuple=True)
    wide = compute_dtype(x.dtype)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    if len(row):
        one = torch.ones(len(row), 1, dtype=wide, device=x.device)
        each = moe_experts(x[row], expert_ids[row, slot][:, None], one, experts)
        out.index_add_(0, row, each.to(wide) * weights[row, slot][:, None].to(wide))
    return out.to(x.dtype)


def _shared_reference(x: Tensor, shared: DenseExperts) -> Tensor:
    everyone = torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device)
    return _reference(x, everyone, torch.ones(x.shape[0], 1, device=x.device), shared)


def _tensors(experts: PackedExperts | DenseExperts) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    if isinstance(experts, DenseExperts):
        return experts.gate_up, None, experts.down, None
    return experts.gate_up_packed, experts.gate_up_scale, experts.down_packed, experts.down_scale


@by_layout
def _runs_kernel(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    experts: PackedExperts | DenseExperts,
    shared: DenseExperts | None,
    impl: str,
) -> bool:
    """Check the arguments of `moe_int4`; say whether the kernels run."""
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    if impl == "cuda" and not x.is_cuda:
        raise UnsupportedDevice(f"moe_int4: impl 'cuda' needs CUDA tensors, x is on {x.device}")
    check_moe(x, expert_ids, weights, experts, shared)
    if impl == "reference" or not x.is_cuda:
        return False
    alone = (None, None) if shared is None else (shared.gate_up, shared.down)
    _check_for_kernel(x, expert_ids, (*_tensors(experts), *alone))
    return True


def _check_for_kernel(x: Tensor, expert_ids: Tensor, tensors: tuple[Tensor | None, ...]) -> None:
    if x.dtype not in DTYPE_DEFINE:
        raise NotSupported("x", "float32, bfloat16 or float16 (impl='reference' takes others)", x.dtype)
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.is_floating_point() and tensor.dtype not in DTYPE_DEFINE:
            raise NotSupported("experts", "float32, bfloat16 or float16", tensor.dtype)
        if not tensor.is_contiguous():
            raise ShapeError("experts", "contiguous weights", f"strides {tensor.stride()}")
    gate_up, _, _, _, shared_gate_up, _ = tensors
    for matrix in (gate_up, shared_gate_up):
        if matrix is not None and (x.shape[1] % INT4_GROUP or matrix.shape[1] // 2 % INT4_GROUP):
            raise NotSupported("experts", f"D and I multiples of {INT4_GROUP}", (x.shape[1], matrix.shape[1] // 2))
    if gate_up is not None and gate_up.shape[0] > _MAX_EXPERTS:
        raise NotSupported("experts", f"at most {_MAX_EXPERTS}", gate_up.shape[0])
    if expert_ids.numel() > _MAX_PICKS:
        raise NotSupported("expert_ids", f"at most {_MAX_PICKS:,} picks", expert_ids.numel())


@cuda_op("moe_int4")
def _moe_int4(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
) -> Tensor:
    num_rows, width = x.shape
    if num_rows == 0:
        return torch.empty_like(x)
    if x.data_ptr() % _ALIGNMENT:
        x = x.clone()
    for tensor in (gate_up, gate_up_scale, down, down_scale, shared_gate_up, shared_down):
        if tensor is not None and tensor.data_ptr() % _ALIGNMENT:
            raise ShapeError("experts", f"weights at a multiple of {_ALIGNMENT} bytes", tensor.storage_offset())
    inner, num_experts = gate_up.shape[1] // 2, gate_up.shape[0]
    shared = None
    if shared_gate_up is not None and shared_down is not None:
        shared = Shared(shared_gate_up, shared_down)
    scale = None if gate_up_scale is None else gate_up_scale.dtype
    shared_inner = 0 if shared is None else shared.inner
    shape, arch = (width, inner, num_experts, shared_inner), jit.arch_of(x.device)
    path, builds = moe_path(num_rows, expert_ids.shape[1], x.dtype, scale, *shape, arch=arch)
    routed = Routed(expert_ids, weights, gate_up, gate_up_scale, down, down_scale)
    return RUN[path](*builds, x, routed, shared)


@_moe_int4.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)
