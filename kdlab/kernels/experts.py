"""Routed expert weights of one layer, dense or packed INT4: what `moe_experts` reads."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kdlab.kernels.int4 import dequantize_int4


class ExpertWeights(Protocol):
    """Weights of E experts, given out one expert at a time."""

    @property
    def num_experts(self) -> int:
        """Number of experts E."""

    def matrices(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return gate over up [2 * I, D] and down [D, I] of one expert."""


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """Experts in the rows' own dtype."""

    gate_up: Tensor  # [E, 2 * I, D] float, gate rows first
    down: Tensor  # [E, D, I] float

    @property
    def num_experts(self) -> int:
        """Number of experts E."""
        return self.gate_up.shape[0]

    def matrices(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return gate over up [2 * I, D] and down [D, I] of one expert."""
        return self.gate_up[expert], self.down[expert]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Experts in INT4 `pack-quantized`; an expert is dequantised when it is asked for."""

    gate_up_packed: Tensor  # [E, 2 * I, D / 8] i32, gate rows first
    gate_up_scale: Tensor  # [E, 2 * I, D / 32] float
    down_packed: Tensor  # [E, D, I / 8] i32
    down_scale: Tensor  # [E, D, I / 32] float

    @property
    def num_experts(self) -> int:
        """Number of experts E."""
        return self.gate_up_packed.shape[0]

    def matrices(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return gate over up [2 * I, D] and down [D, I] of one expert."""
        gate_up = dequantize_int4(self.gate_up_packed[expert], self.gate_up_scale[expert], dtype)
        return gate_up, dequantize_int4(self.down_packed[expert], self.down_scale[expert], dtype)
