"""INT4 in the training loop: the forward pass sees the weights as they will be stored, the gradient passes through."""

import torch
from torch import Tensor

from kdlab.config import INT4_GROUP
from kdlab.kernels.int4 import pack_int4

_LARGEST = 7  # symmetric: -8 stays unused, as in Kimi's own weights


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to INT4, symmetric, one bf16 scale a group of 32 inputs.

    Args:
        weight: [..., n] float, n a multiple of 32.

    Returns:
        values [..., n] float, whole numbers -7..7, and scale [..., n / 32] bf16.
    """
    groups = weight.float().unflatten(-1, (-1, INT4_GROUP))
    scale = (groups.abs().amax(-1) / _LARGEST).clamp_min(1e-8).bfloat16()
    values = (groups / scale[..., None].float()).round().clamp(-_LARGEST, _LARGEST)
    return values.flatten(-2), scale


def fake_quantize(weight: Tensor) -> Tensor:
    """Round a weight to what its stored INT4 reads as; the gradient is that of the identity.

    Args:
        weight: [..., n] f32, n a multiple of 32.

    Returns:
        [..., n] f32.
    """
    values, scale = quantize(weight.detach())
    stored = values * scale.float().repeat_interleave(INT4_GROUP, dim=-1)
    return weight + (stored - weight).detach()


def packed(weight: Tensor) -> dict[str, Tensor]:
    """Pack one matrix as `pack-quantized` stores it.

    Args:
        weight: [out, in] float, `in` a multiple of 32.

    Returns:
        weight_packed [out, in / 8] i32, weight_scale [out, in / 32] bf16 and weight_shape [2] i32.
    """
    values, scale = quantize(weight)
    shape = torch.tensor(list(weight.shape), dtype=torch.int32)
    return {"weight_packed": pack_int4(values.int()), "weight_scale": scale, "weight_shape": shape}
