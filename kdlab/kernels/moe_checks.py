"""Checks of the arguments of `moe_int4`: shapes, dtypes and devices of rows, picks and expert weights."""

import torch
from torch import Tensor

from kdlab.checks import check_float_tensor, check_int, check_integer_tensor, check_shape
from kdlab.config import INT4_GROUP
from kdlab.errors import ShapeError
from kdlab.kernels.experts import DenseExperts, PackedExperts
from kdlab.kernels.int4 import VALUES_PER_WORD


def check_moe(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    experts: PackedExperts | DenseExperts,
    shared: DenseExperts | None,
) -> None:
    """Raise ShapeError or ArgumentError unless the arguments of `moe_int4` fit one another; no value is looked at."""
    sizes = check_shape("x", x, ["T", "D"])
    top_k = check_shape("expert_ids", expert_ids, [sizes["T"], "k"])["k"]
    check_int("expert_ids.shape[1]", top_k, minimum=1)
    check_integer_tensor("expert_ids", expert_ids)
    check_shape("weights", weights, [sizes["T"], top_k])
    check_float_tensor("x", x)
    check_float_tensor("weights", weights)
    if not isinstance(experts, PackedExperts | DenseExperts):
        raise ShapeError("experts", "PackedExperts or DenseExperts", type(experts).__name__)
    named = {"expert_ids": expert_ids, "weights": weights}
    named |= check_experts("experts", experts, x)
    if shared is not None:
        if not isinstance(shared, DenseExperts) or shared.num_experts != 1:
            raise ShapeError("shared", "DenseExperts of one expert", getattr(shared, "num_experts", shared))
        named |= check_experts("shared", shared, x)
    for name, tensor in named.items():
        if tensor.device != x.device:
            raise ShapeError(name, f"on {x.device}", tensor.device)


def check_experts(name: str, experts: PackedExperts | DenseExperts, x: Tensor) -> dict[str, Tensor]:
    """Check one set of experts against rows [T, D]; return its tensors by name."""
    width = x.shape[1]
    if isinstance(experts, DenseExperts):
        named = {f"{name}.gate_up": experts.gate_up, f"{name}.down": experts.down}
        sizes = check_shape(f"{name}.gate_up", experts.gate_up, ["E", "2I", width])
        inner = _half(f"{name}.gate_up", experts.gate_up, sizes["2I"])
        check_shape(f"{name}.down", experts.down, [sizes["E"], width, inner])
        dtypes = dict.fromkeys(named, x.dtype)
    else:
        fields = ("gate_up_packed", "gate_up_scale", "down_packed", "down_scale")
        named = {f"{name}.{field}": getattr(experts, field) for field in fields}
        for multiple, what in ((VALUES_PER_WORD, "words"), (INT4_GROUP, "groups")):
            if width % multiple:
                raise ShapeError("x", f"[T, D], D in whole {what} of {multiple}", list(x.shape))
        sizes = check_shape(f"{name}.gate_up_packed", experts.gate_up_packed, ["E", "2I", width // VALUES_PER_WORD])
        inner = _half(f"{name}.gate_up_packed", experts.gate_up_packed, sizes["2I"])
        if inner % INT4_GROUP:
            raise ShapeError(f"{name}.down_packed", f"I a multiple of {INT4_GROUP}", inner)
        count = sizes["E"]
        check_shape(f"{name}.gate_up_scale", experts.gate_up_scale, [count, 2 * inner, width // INT4_GROUP])
        check_shape(f"{name}.down_packed", experts.down_packed, [count, width, inner // VALUES_PER_WORD])
        check_shape(f"{name}.down_scale", experts.down_scale, [count, width, inner // INT4_GROUP])
        scale = experts.gate_up_scale.dtype
        if not scale.is_floating_point:
            raise ShapeError(f"{name}.gate_up_scale", "floating point", scale)
        dtypes = dict(zip(named, (torch.int32, scale, torch.int32, scale), strict=True))
    check_int(f"{name}: number of experts", sizes["E"], minimum=1)
    for field, tensor in named.items():
        if tensor.dtype != dtypes[field]:
            raise ShapeError(field, str(dtypes[field]), tensor.dtype)
    return named


def _half(name: str, tensor: Tensor, rows: int) -> int:
    if rows % 2 or not rows:
        raise ShapeError(name, "[E, 2I, ..], gate rows first", list(tensor.shape))
    return rows // 2
