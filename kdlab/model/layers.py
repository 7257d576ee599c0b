"""What every layer is made of: uninitialised weights, and modules that say which checkpoint tensor each weight is."""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kdlab.errors import UnsupportedDevice


def weight(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """Return a parameter that holds no values yet and wants no gradient; UnsupportedDevice where memory is short."""
    try:
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
    except RuntimeError as error:
        raise UnsupportedDevice(f"weight {list(shape)} {dtype}: expected room on {device}, got none") from error


class Loadable(Protocol):
    """A module that knows its tensors by their Hugging Face names."""

    def views(self) -> dict[str, Tensor]:
        """Return name -> view into a weight; writing the views loads the module, reading them exports it."""


def prefixed(prefix: str, module: Loadable) -> dict[str, Tensor]:
    """Return the module's views with `prefix` before each name."""
    return {prefix + name: view for name, view in module.views().items()}


class SwiGlu(nn.Module):
    """down(silu(gate x) * up x), with gate and up in one matrix."""

    def __init__(self, width: int, inner: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.gate_up = weight(2 * inner, width, dtype=dtype, device=device)
        self.down = weight(width, inner, dtype=dtype, device=device)

    def views(self) -> dict[str, Tensor]:
        """Return the weights by checkpoint name."""
        gate, up = self.gate_up.chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self.down}

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., D] to [..., D]."""
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)
