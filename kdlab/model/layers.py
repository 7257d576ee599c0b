"""What every layer is made of: uninitialised weights, and modules that say which checkpoint tensor each weight is."""

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Part:
    """A view into a weight, and which part of a checkpoint tensor it holds.

    Attributes:
        view: to be filled or read.
        shape: of the whole tensor in a checkpoint, as stored: INT4 words count as words.
        index: one slice an axis: the view holds tensor[index], which may be nothing where another rank has it all.
    """

    view: Tensor
    shape: tuple[int, ...]
    index: tuple[slice, ...]

    @classmethod
    def whole(cls, view: Tensor) -> "Part":
        """Return the part that is all of the tensor."""
        return cls(view, tuple(view.shape), (slice(None),) * view.dim())

    @property
    def is_whole(self) -> bool:
        """True when the view holds all of the tensor."""
        return tuple(self.view.shape) == self.shape


class Loadable(Protocol):
    """A module that knows its tensors by their Hugging Face names."""

    def views(self) -> dict[str, Part]:
        """Return name -> part of a tensor; writing the parts' views loads the module, reading them exports it."""


def prefixed(prefix: str, module: Loadable) -> dict[str, Part]:
    """Return the module's parts with `prefix` before each name."""
    return {prefix + name: part for name, part in module.views().items()}


def wholes(**tensors: Tensor) -> dict[str, Part]:
    """Return the whole tensors as parts named NAME.weight."""
    return {f"{name}.weight": Part.whole(tensor) for name, tensor in tensors.items()}


class SwiGlu(nn.Module):
    """down(silu(gate x) * up x), with gate and up in one matrix."""

    def __init__(self, width: int, inner: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.gate_up = weight(2 * inner, width, dtype=dtype, device=device)
        self.down = weight(width, inner, dtype=dtype, device=device)

    def views(self) -> dict[str, Part]:
        """Return the weights by checkpoint name."""
        gate, up = self.gate_up.chunk(2)
        return wholes(gate_proj=gate, up_proj=up, down_proj=self.down)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., D] to [..., D]."""
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)
