"""What the kernel benchmark is made of: a case (an op at one size) and its arms (who does it, and what is right)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdlab.kernels.cost import Cost

Inputs = dict[str, Any]
"""One buffer set: the tensors of one call, by name."""

VOCAB_SIZE, HIDDEN, LATENT, ROPE, NUM_LAYERS = 163_840, 7_168, 512, 64, 61
NUM_EXPERTS, EXPERTS_A_TOKEN, EXPERT_WIDTH, GROUP = 384, 8, 2_048, 32
TOP_K, DEPTH_LIMIT, PAGE = 64, 15, 64
SCALE = 0.14467963
"""Kimi K2.6's sizes: what the benchmark is about, and no default of any op."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One implementation of an op."""

    run: Callable[[Inputs], Any]  # what is timed
    error: Callable[[Inputs, Any], float]  # of a result, given inputs that no arm has touched
    limit: float = 0.0  # largest error of a right result
    graph: bool = True  # whether a CUDA graph can hold it
    prepare: Callable[[Inputs], Inputs] | None = None  # data in the layout that the arm wants; not timed
    own: bool = True  # kdlab's kernel, else a peer
    timed: bool = True  # else it only shows its error beside the others'
    short: bool = True  # quick enough for a short run
    goal: bool = False  # the arm that a user gets, and that the goal is about


@dataclass(frozen=True, slots=True)
class Case:
    """An op at one size, with all who do it."""

    op: str
    sizes: Mapping[str, Any]  # the row's case; streams, rows and context become columns
    make: Callable[[int], Inputs]  # the buffer set of a seed
    arms: Mapping[str, Arm]
    cost: Callable[[Inputs], Cost]  # fewest bytes and operations of a set
    set_bytes: int  # what a call touches, about
    default: bool = True  # in the short run as well

    @property
    def name(self) -> str:
        """The op and its sizes in one line."""
        return f"{self.op} " + " ".join(f"{name}={value}" for name, value in self.sizes.items())


def relative_error(out: Tensor, exact: Tensor) -> float:
    """Return the largest error of a row (last axis) over the norm of the exact row; infinite where `out` is not finite.

    Args:
        out: [..., D] float.
        exact: [..., D] float64; rows of zeros must be zero in `out`.

    Raises:
        ValueError: other shapes.
    """
    if out.shape != exact.shape:
        raise ValueError(f"a result of shape {list(out.shape)}, expected {list(exact.shape)}")
    wrong, size = (out.double() - exact).norm(dim=-1), exact.norm(dim=-1)
    error = torch.where(size > 0, wrong / size, torch.where(wrong > 0, torch.inf, 0.0))
    return float(error.nan_to_num(torch.inf, torch.inf).max())


def wrong_share(out: Tensor, exact: Tensor) -> float:
    """Return the share of entries that differ; 1 when the shapes do."""
    if out.shape != exact.shape:
        return 1.0
    return float((out != exact.to(out.device)).double().mean())


def generator(seed: int, device: str = "cuda") -> torch.Generator:
    """Return a random generator of the device, seeded."""
    return torch.Generator(device).manual_seed(seed)


def normal(*shape: int, seed: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return normal random numbers on the GPU: random data, because zeros run faster and hide errors."""
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(0.0, std, generator=generator(seed))
