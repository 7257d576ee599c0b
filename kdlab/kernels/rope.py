"""Rotary position embedding: frequencies, cos and sin at given positions, and the rotation in both pair layouts."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from kdlab.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Return the angle a position adds to each pair, [R/2] f64 in radians, on the CPU.

    YaRN (arXiv 2309.00071, section 3.2) keeps the fast pairs, divides the slow ones by the factor and ramps between.
    """
    pairs = torch.arange(rope.dim // 2, dtype=torch.float64)
    plain = rope.theta ** (-2.0 * pairs / rope.dim)
    if rope.factor is None:
        return plain
    low, high = yarn_range(rope)
    # A width of zero would divide by zero: the reference opens it by a thousandth.
    ramp = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def yarn_range(rope: RopeConfig) -> tuple[float, float]:
    """Return the ends of YaRN's ramp: the pairs that turn beta_fast and beta_slow times in the old length."""
    low, high = (_pair_of_turns(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, rope.dim - 1)


def _pair_of_turns(rope: RopeConfig, turns: float) -> float:
    return rope.dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def rope_tables(positions: Tensor, rope: RopeConfig, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """Return cos and sin at each position, times the amplitude.

    Args:
        positions: [...] int, absolute positions.
        rope: the constants.
        device: where the tables go; None is the positions' own device.

    Returns:
        Two tensors [..., R/2] f32; the angles are formed in float64, as positions reach 262,143.
    """
    where = positions.device if device is None else torch.device(device)
    angles = positions.to(where, torch.float64)[..., None] * frequencies_on(rope, where)
    return (angles.cos() * rope.amplitude).float(), (angles.sin() * rope.amplitude).float()


@lru_cache(maxsize=64)
def frequencies_on(rope: RopeConfig, device: torch.device) -> Tensor:
    """Return `inverse_frequencies` on a device; nobody writes to them."""
    # Every forward asks: made once, a GPU forward needs no copy from the host.
    return inverse_frequencies(rope).to(device)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the pairs of the last axis, and leave them where they stand.

    Args:
        x: [..., R] float.
        cos: [..., R/2] float, broadcastable to x's leading axes; sin alike.
        sin: [..., R/2] float.
        interleaved: pairs are (2i, 2i+1), as in Kimi K2.6's target; else (i, i + R/2), as in its drafter.

    Returns:
        [..., R] in x's dtype; the products are formed in the wider of x's dtype and the tables'.
    """
    return rotate(x, pair_tables(cos, sin, interleaved), interleaved)


def pair_tables(cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return cos and (-sin, sin) as the pairs of `rotate` lie: [..., R/2, 2] where interleaved, else [..., 2, R/2]."""
    axis = -1 if interleaved else -2
    return torch.stack([cos, cos], dim=axis), torch.stack([-sin, sin], dim=axis)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Do what `apply_rope` does, with tables that serve many calls.

    Args:
        x: [..., R] float.
        tables: of `pair_tables`, broadcastable to x's leading axes.
        interleaved: see `apply_rope`.

    Returns:
        [..., R] in x's dtype.
    """
    pairs = x.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    turned = pairs * tables[0] + pairs.flip(-1 if interleaved else -2) * tables[1]
    return turned.flatten(-2).to(x.dtype)
