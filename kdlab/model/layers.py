"""What every layer is made of: uninitialised weights, and modules that say which checkpoint tensor each weight is."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from kdlab.errors import UnsupportedDevice
from kdlab.kernels.skinny_linear import skinny_linear
from kdlab.model.ranks import ONE_RANK, Ranks


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

    @classmethod
    def along(cls, view: Tensor, axis: int, span: slice, total: int) -> "Part":
        """Return the part that holds `span` of the tensor's `total` rows (axis 0) or columns (axis 1)."""
        shape, index = list(view.shape), [slice(None)] * view.dim()
        shape[axis], index[axis] = total, span
        return cls(view, tuple(shape), tuple(index))

    def nothing(self) -> "Part":
        """Return the same of another rank's tensor: a part that holds none of its rows."""
        return Part(self.view[:0], self.shape, (slice(0, 0), *self.index[1:]))

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


def parts(axis: int, span: slice, total: int, **tensors: Tensor) -> dict[str, Part]:
    """Return tensors as parts named NAME.weight, each along `axis`; see `Part.along`."""
    return {f"{name}.weight": Part.along(tensor, axis, span, total) for name, tensor in tensors.items()}


class SwiGlu(nn.Module):
    """down(silu(gate x) * up x), with gate and up in one matrix; a rank holds a part of the inner width."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ranks: Ranks = ONE_RANK,
        unit: int = 1,
    ) -> None:
        """Make the weights; the inner width is split over the ranks in units of `unit`."""
        super().__init__()
        self.inner, self.span = inner, ranks.span(inner, unit, name="the inner width")
        held = self.span.stop - self.span.start
        self.gate_up = weight(2 * held, width, dtype=dtype, device=device)
        self.down = weight(width, held, dtype=dtype, device=device)

    def views(self) -> dict[str, Part]:
        """Return the weights by checkpoint name."""
        gate, up = self.gate_up.chunk(2)
        rows = parts(0, self.span, self.inner, gate_proj=gate, up_proj=up)
        return rows | parts(1, self.span, self.inner, down_proj=self.down)

    def forward(self, x: Tensor, ops: str = "reference") -> Tensor:
        """Map x [..., D] to [..., D]: this rank's summand of it; `ops` is what `skinny_linear` runs as."""
        hidden = skinny_linear(x.flatten(0, -2), self.gate_up, gated=True, impl=ops)
        return skinny_linear(hidden, self.down, impl=ops).view(x.shape)
