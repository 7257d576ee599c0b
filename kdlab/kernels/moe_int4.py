"""moe_int4: the experts of a few rows, INT4 or dense, grouped on the device; each distinct expert is read once."""

from typing import NamedTuple

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_float
from kdlab.config import INT4_GROUP
from kdlab.errors import NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import jit
from kdlab.kernels.constants import DTYPE_DEFINE
from kdlab.kernels.cost import Cost
from kdlab.kernels.experts import DenseExperts, PackedExperts
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.mla import compute_dtype
from kdlab.kernels.moe_builds import MOST_ROW_PICKS, THREADS, blocks_per_sm, row_build, row_features, rows_build
from kdlab.kernels.moe_checks import check_moe
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

    A row's result does not depend on the other rows, bit for bit. On a GPU nothing waits for the host.

    Args:
        x: [T, D] float32, bfloat16 or float16 (the reference also takes float64).
        expert_ids: [T, k] i32 (or i64); an id outside 0..E-1 is no expert: padding, or another rank's.
        weights: [T, k] float.
        experts: E experts; dense ones in x's dtype, packed ones with scales of any float dtype but float64.
        shared: one dense expert in x's dtype that every row runs through with weight 1; its width may differ.
        impl: "auto" (the kernel for CUDA tensors, the reference for others), "cuda" or "reference".

    Returns:
        [T, D] in x's dtype, summed in float32 in the order of the slots, the shared expert last.

    Raises:
        ShapeError: the arguments do not fit one another. NotSupported: D or I that the kernel does not take.
        UnsupportedDevice: "cuda" for tensors on another device. ArgumentError: an unknown impl.
    """
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    if impl == "cuda" and not x.is_cuda:
        raise UnsupportedDevice(f"moe_int4: impl 'cuda' needs CUDA tensors, x is on {x.device}")
    check_moe(x, expert_ids, weights, experts, shared)
    if impl == "reference" or not x.is_cuda:
        out = _reference(x, expert_ids, weights, experts)
        return out if shared is None else out + _shared_reference(x, shared)
    if expert_ids.dtype != torch.int32:
        expert_ids = expert_ids.clamp(-1, experts.num_experts).int()
    routed = _tensors(experts)
    alone = (None, None) if shared is None else (shared.gate_up, shared.down)
    _check_for_kernel(x, expert_ids, (*routed, *alone))
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


class _Set(NamedTuple):
    """Experts that share a format: the routed ones, or the shared one."""

    build: jit.Build
    ids: Tensor | None  # None: every row goes to expert 0
    gate_up: Tensor
    gate_up_scale: Tensor | None
    down: Tensor
    down_scale: Tensor | None

    @property
    def inner(self) -> int:
        return self.gate_up.shape[1] // 2


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
        alone = rows_build(x.dtype, None, width, shared_gate_up.shape[1] // 2, 1)
        shared = _Set(alone, None, shared_gate_up, None, shared_down, None)
    row = None
    if num_rows == 1 and gate_up_scale is not None and expert_ids.shape[1] <= MOST_ROW_PICKS:
        row = row_build(x.dtype, gate_up_scale.dtype, width, inner, num_experts)
    if row is not None:
        return _run_row(x, weights, _Set(row, expert_ids, gate_up, gate_up_scale, down, down_scale), shared)
    build = rows_build(x.dtype, None if gate_up_scale is None else gate_up_scale.dtype, width, inner, num_experts)
    return _run_rows(x, weights, _Set(build, expert_ids, gate_up, gate_up_scale, down, down_scale), shared)


def _run_rows(x: Tensor, weights: Tensor, routed: _Set, shared: _Set | None) -> Tensor:
    """Launch for any number of rows. The shared expert's products stand where they can run beside the routed ones."""
    (num_rows, width), top_k = x.shape, weights.shape[1]
    slots = top_k + (shared is not None)
    out, parts = torch.empty_like(x), x.new_empty(num_rows, slots, width, dtype=torch.float32)
    hidden = x.new_empty(num_rows, top_k, routed.inner)
    shared_hidden = _shared_up(x, shared)
    _gate_up(routed, x, hidden, beside=shared is not None)
    _down(routed, hidden, parts, first_slot=0, beside=False)
    if shared is not None and shared_hidden is not None:
        _down(shared, shared_hidden, parts, first_slot=top_k, beside=True)
    grid = (num_rows, -(-width // (4 * THREADS)))
    _launch(routed.build, "moe_sum", grid, parts, routed.ids, weights, out, top_k, slots)
    return out


def _run_row(x: Tensor, weights: Tensor, routed: _Set, shared: _Set | None) -> Tensor:
    """Launch for one row: its picks have blocks of their own, and are added up by the kernel that makes them."""
    width, top_k = x.shape[1], weights.shape[1]
    out, hidden = torch.empty_like(x), x.new_empty(top_k, routed.inner)
    part = None if shared is None else x.new_empty(1, 1, width, dtype=torch.float32)
    shared_hidden = _shared_up(x, shared)
    ids, build = routed.ids, routed.build
    matrix = (routed.gate_up, routed.gate_up_scale)
    grid = top_k * -(-routed.inner // row_features(width, gated=True))
    _launch(build, "moe_row_gate_up", grid, x, ids, *matrix, hidden, int(shared is not None))
    if shared is not None and shared_hidden is not None and part is not None:
        _down(shared, shared_hidden, part, first_slot=0, beside=False)
    grid = -(-width // row_features(routed.inner, gated=False))
    _launch(build, "moe_row_down", grid, hidden, ids, weights, routed.down, routed.down_scale, part, out, top_k)
    return out


def _shared_up(x: Tensor, shared: _Set | None) -> Tensor | None:
    if shared is None:
        return None
    hidden = x.new_empty(x.shape[0], 1, shared.inner)
    _gate_up(shared, x, hidden, beside=False)
    return hidden


def _gate_up(one: _Set, x: Tensor, hidden: Tensor, *, beside: bool) -> None:
    sizes = (*hidden.shape[:2], int(beside))
    _launch(one.build, "moe_gate_up", _num_blocks(x), x, one.ids, one.gate_up, one.gate_up_scale, hidden, *sizes)


def _down(one: _Set, hidden: Tensor, parts: Tensor, *, first_slot: int, beside: bool) -> None:
    sizes = (*hidden.shape[:2], parts.shape[1], first_slot, int(beside))
    _launch(one.build, "moe_down", _num_blocks(hidden), hidden, one.ids, one.down, one.down_scale, parts, *sizes)


def _num_blocks(rows: Tensor) -> int:
    return jit.num_sms(rows.device) * blocks_per_sm(rows.dtype)


@_moe_int4.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def _launch(build: jit.Build, name: str, grid: int | tuple[int, int], rows: Tensor, *args: object) -> None:
    kernel = jit.kernel(build, name, rows.device)
    kernel.launch(grid, THREADS, rows, *args, shared_bytes=dict(build.shared_bytes)[name], overlap=True)
