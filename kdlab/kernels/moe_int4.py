"""moe_int4: the experts of a few rows, INT4 or dense, grouped on the device; each distinct expert is read once."""

import functools
import math
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
from kdlab.kernels.jit_ops import cuda_op
from kdlab.kernels.moe_checks import check_moe
from kdlab.kernels.reference import compute_dtype, moe_experts

_THREADS = 256
_WARPS, _TILE_PICKS = _THREADS // 32, 8
_MAX_STAGES, _RING_BYTES = 4, 90_000  # with the static part, what the smallest GPU has for a block
_BLOCKS_PER_SM = 2
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


@functools.lru_cache(maxsize=64)
def _build(dtype: torch.dtype, scale: torch.dtype | None, width: int, inner: int, num_experts: int) -> jit.Build:
    """Return the build for rows of `dtype` and INT4 weights with scales of a dtype, or dense ones (None)."""
    stage = max(_stage_bytes(dtype, scale, inputs) for inputs in (width, inner))
    stages = min(_MAX_STAGES, _RING_BYTES // stage)
    ring = stages * stage
    defines = {
        "DTYPE": DTYPE_DEFINE[dtype],
        "PACKED": int(scale is not None),
        "SCALE_DTYPE": DTYPE_DEFINE[dtype if scale is None else scale],
        "MODEL_WIDTH": width,
        "INNER_WIDTH": inner,
        "NUM_EXPERTS": num_experts,
        "STAGES": stages,
        "RING_BYTES": ring,
        "BLOCKS_PER_SM": _blocks_per_sm(dtype),
    }
    dynamic = (("moe_gate_up", ring), ("moe_down", ring), ("moe_sum", 0))
    return jit.Build("moe_int4.cu", tuple(defines.items()), shared_bytes=dynamic)


def _blocks_per_sm(dtype: torch.dtype) -> int:
    """Return for how many blocks a multiprocessor has registers. Where shared memory holds fewer, they run in turns."""
    return 1 if dtype == torch.float32 else _BLOCKS_PER_SM


def _stage_bytes(dtype: torch.dtype, scale: torch.dtype | None, inputs: int) -> int:
    """Return the bytes of `Stage` in moe_weights.cuh, which asserts that they are enough."""
    packed, narrow = scale is not None, dtype != torch.float32
    warp_rows = 64 if packed and narrow else 32
    warp_inputs = math.gcd(inputs, 64 if packed else 32)
    k_warps = math.gcd(inputs // warp_inputs, _WARPS)
    rows, slab = warp_rows * _WARPS // k_warps, warp_inputs * k_warps
    size = rows * slab // 2 if packed else rows * slab * dtype.itemsize
    if scale is not None:
        scale_bytes = slab // INT4_GROUP * scale.itemsize
        size += -(-rows * (scale_bytes + (16 if scale_bytes >= 32 else 0)) // 128) * 128
    if narrow:
        size += _TILE_PICKS * slab * dtype.itemsize
    return max(size, _WARPS * _TILE_PICKS * (warp_rows + 4) * 4)


class _Set(NamedTuple):
    """Experts that share a format: the routed ones, or the shared one."""

    build: jit.Build
    ids: Tensor | None  # None: every row goes to expert 0
    top_k: int
    first_slot: int
    gate_up: Tensor
    gate_up_scale: Tensor | None
    down: Tensor
    down_scale: Tensor | None


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
    top_k = expert_ids.shape[1]
    out = torch.empty_like(x)
    if num_rows == 0:
        return out
    if x.data_ptr() % _ALIGNMENT:
        x = x.clone()
    for tensor in (gate_up, gate_up_scale, down, down_scale, shared_gate_up, shared_down):
        if tensor is not None and tensor.data_ptr() % _ALIGNMENT:
            raise ShapeError("experts", f"weights at a multiple of {_ALIGNMENT} bytes", tensor.storage_offset())
    blocks = jit.num_sms(x.device) * _blocks_per_sm(x.dtype)
    parts = x.new_empty(num_rows, top_k + (shared_gate_up is not None), width, dtype=torch.float32)
    scale = None if gate_up_scale is None else gate_up_scale.dtype
    build = _build(x.dtype, scale, width, gate_up.shape[1] // 2, gate_up.shape[0])
    sets = [_Set(build, expert_ids, top_k, 0, gate_up, gate_up_scale, down, down_scale)]
    if shared_gate_up is not None and shared_down is not None:
        alone = _build(x.dtype, None, width, shared_gate_up.shape[1] // 2, 1)
        sets.append(_Set(alone, None, 1, top_k, shared_gate_up, None, shared_down, None))
    hidden = [x.new_empty(num_rows, one.top_k, one.gate_up.shape[1] // 2) for one in sets]
    for one, rows in zip(sets, hidden, strict=True):
        matrix = (one.gate_up, one.gate_up_scale)
        _launch(one.build, "moe_gate_up", blocks, x, one.ids, *matrix, rows, num_rows, one.top_k)
    for one, rows in zip(sets, hidden, strict=True):
        sizes = (num_rows, one.top_k, parts.shape[1], one.first_slot)
        _launch(one.build, "moe_down", blocks, rows, one.ids, one.down, one.down_scale, parts, *sizes)
    grid = (num_rows, -(-width // (4 * _THREADS)))
    _launch(build, "moe_sum", grid, parts, expert_ids, weights, out, top_k, parts.shape[1])
    return out


@_moe_int4.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def _launch(build: jit.Build, name: str, grid: int | tuple[int, int], rows: Tensor, *args: object) -> None:
    kernel = jit.kernel(build, name, rows.device)
    kernel.launch(grid, _THREADS, rows, *args, shared_bytes=dict(build.shared_bytes)[name], overlap=True)


_K26 = (7168, 384)  # D and E; I is 2048, or 256 on one rank of 8
BUILDS = tuple(
    _build(dtype, torch.bfloat16 if packed else None, _K26[0], inner, _K26[1] if packed else 1)
    for dtype, inners in ((torch.bfloat16, (2048, 256)), (torch.float16, (2048,)), (torch.float32, (2048,)))
    for inner in inners
    for packed in (True, False)
)
