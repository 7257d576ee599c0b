"""Argument checks, and the dimension letters that every docstring uses.

S streams · N tree rows (root included) · B budget = N - 1 · L depth limit (draft positions) · K draft top-k ·
V vocabulary · D hidden width · H heads · C latent width (kv_lora_rank) · R rope width · T rows of a flat batch ·
E experts · b block size.
"""

import math
from collections.abc import Sequence
from numbers import Real

import torch

from kdlab.errors import ArgumentError, ShapeError

MAX_TOKEN = 2**31 - 1


def check_int(name: str, value: object, *, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return `value` as an int, or raise ArgumentError: bools, floats and values out of range are refused."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentError(name, "an integer", repr(value))
    try:
        number = int(value.__index__())
    except TypeError as error:  # an array or a tensor has the method whatever it holds
        raise ArgumentError(name, "an integer", repr(value)) from error
    if minimum is not None and number < minimum:
        raise ArgumentError(name, f"at least {minimum}", number)
    if maximum is not None and number > maximum:
        raise ArgumentError(name, f"at most {maximum}", number)
    return number


def check_float(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    below: float = math.inf,
) -> float:
    """Return `value` as a float, or raise ArgumentError: bools, NaN, infinities and values out of range are refused."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ArgumentError(name, "a finite number", repr(value))
    number = float(value)
    if not (above < number < below and minimum <= number <= maximum):
        limits = {"above": above, "at least": minimum, "at most": maximum, "below": below}
        expected = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit))
        raise ArgumentError(name, f"a number {expected}", repr(value))
    return number


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ArgumentError unless `value` is one of `choices`."""
    if value not in choices:
        raise ArgumentError(name, "one of " + ", ".join(map(repr, choices)), repr(value))


def check_float_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise ShapeError unless `tensor` holds real floating-point values."""
    if not tensor.is_floating_point():
        raise ShapeError(name, "a floating-point dtype", tensor.dtype)


def check_integer_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise ShapeError unless `tensor` holds integers; bool is none."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ShapeError(name, "an integer dtype", tensor.dtype)


def check_token_tensor(name: str, tensor: torch.Tensor, *, minimum: int | None = None) -> None:
    """Raise unless `tensor` holds 32-bit integers of at least `minimum`; values are looked at on the CPU only."""
    check_integer_tensor(name, tensor)
    if tensor.device.type == "cpu" and tensor.numel():
        low, high = (int(value) for value in tensor.long().aminmax())
        check_int(name, high, maximum=MAX_TOKEN)
        check_int(name, low, minimum=-MAX_TOKEN - 1 if minimum is None else minimum)


def check_dense(name: str, tensor: object, shape: str = "") -> None:
    """Raise ShapeError unless `tensor` is a tensor whose values lie in memory; `shape` is for the message."""
    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(name, f"a tensor{shape}", type(tensor).__name__)
    if tensor.layout is not torch.strided:
        raise ShapeError(name, f"a dense tensor{shape}", tensor.layout)


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | str]) -> dict[str, int]:
    """Check `tensor` against `shape`: ints must match, equal letters must agree; returns the size of each letter."""
    sizes: dict[str, int] = {}
    check_dense(name, tensor, f" {_written(shape)}")
    actual = tensor.shape
    if len(actual) != len(shape):
        raise ShapeError(name, _written(shape), list(actual))
    for size, want in zip(actual, shape, strict=True):
        if size != (want if isinstance(want, int) else sizes.setdefault(want, size)):
            raise ShapeError(name, _written(shape), list(actual))
    return sizes


def _written(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
