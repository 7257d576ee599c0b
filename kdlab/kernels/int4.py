"""INT4 `pack-quantized`, the format of Kimi K2.6's routed experts: eight values an int32 word, a scale a group of 32.

Value q in -8..7 is stored as the nibble q + 8; element 8k + i of a row sits in bits 4i..4i+3 of word k.
"""

import torch
from torch import Tensor

from kdlab.checks import check_dense, check_float_tensor, check_integer_tensor, check_shape
from kdlab.config import INT4_GROUP
from kdlab.errors import ArgumentError, ShapeError

VALUES_PER_WORD = 8


def pack_int4(values: Tensor) -> Tensor:
    """Pack values -8..7 along the last axis.

    Args:
        values: [..., n] int, n a multiple of 8.

    Returns:
        [..., n / 8] i32.

    Raises:
        ArgumentError: a value outside -8..7. ShapeError: no integers, or n is not a multiple of 8.
    """
    check_dense("values", values)
    check_integer_tensor("values", values)
    if values.shape[-1] % VALUES_PER_WORD:
        raise ShapeError("values", f"a last axis that is a multiple of {VALUES_PER_WORD}", list(values.shape))
    if values.numel() and (values.min() < -8 or values.max() > 7):
        raise ArgumentError("values", "-8 to 7", f"{int(values.min())} to {int(values.max())}")
    nibbles = (values.long() + 8).unflatten(-1, (-1, VALUES_PER_WORD))
    words = (nibbles << _shifts(values.device).long()).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the values [..., n] i32 of words [..., n / 8] i32.

    Raises:
        ShapeError: the words are not int32 (bytes of two values each are another format).
    """
    check_dense("packed", packed)
    if packed.dtype != torch.int32:
        raise ShapeError("packed", "int32 words of 8 values", packed.dtype)
    return (((packed[..., None] >> _shifts(packed.device)) & 15) - 8).flatten(-2)


def dequantize_int4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return value times scale.

    Args:
        packed: [..., out, in / 8] i32.
        scale: [..., out, in / 32] float.
        dtype: float dtype of the result.

    Returns:
        [..., out, in]: the product is exact before the one rounding to `dtype`.

    Raises:
        ShapeError: packed and scale do not belong together.
    """
    check_dense("packed", packed)
    columns = packed.shape[-1] * VALUES_PER_WORD
    check_shape("scale", scale, [*packed.shape[:-1], columns // INT4_GROUP])
    check_float_tensor("scale", scale)
    if scale.device != packed.device:
        raise ShapeError("scale", f"on {packed.device}, as the words", scale.device)
    if columns % INT4_GROUP:
        raise ShapeError("packed", f"rows of a multiple of {INT4_GROUP // VALUES_PER_WORD} words", list(packed.shape))
    # Four bits times the 8 or 11 of a 16-bit scale fit float32; the 24 of a float32 scale need float64.
    exact = torch.float32 if scale.element_size() == 2 and dtype != torch.float64 else torch.float64
    groups = unpack_int4(packed).unflatten(-1, (-1, INT4_GROUP)).to(exact)
    return (groups * scale[..., None].to(exact)).flatten(-2).to(dtype)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 32, 4, dtype=torch.int32, device=device)
