"""What the card at hand can do, measured in the same run: the rates that floors and fractions are made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kdlab.bench.kernels.case import normal
from kdlab.bench.rows import summarize_samples
from kdlab.bench.timing import Call, graph_times_us
from kdlab.kernels.cost import Cost

_COPY_BYTES = 1 << 30
_EDGE = 8192


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One measured ceiling of the card."""

    name: str
    unit: str
    samples: list[float]
    what: str

    @property
    def median(self) -> float:
        """The ceiling itself."""
        return summarize_samples(self.samples)["median"]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """All of them, by name."""

    all: tuple[Ceiling, ...]

    def __getitem__(self, name: str) -> float:
        return next(ceiling.median for ceiling in self.all if ceiling.name == name)

    def floor_us(self, cost: Cost) -> float:
        """Return the bound of a call: its bytes, its operations, or one kernel that does nothing."""
        return max(cost.floor_us(bytes_per_s=1e12 * self["read"], flops_per_s=1e12 * self["matrix"]), self["launch"])


def measure_ceilings(seconds: float) -> Ceilings:
    """Measure copy and read bandwidth, the matrix rate, and what a kernel costs that does nothing."""
    found = []
    for name, unit, what, work, make in _CEILINGS:
        times = graph_times_us(make(), seconds=seconds / len(_CEILINGS))
        found.append(Ceiling(name, unit, [work / us / 1e6 if work else us for us in times], what))
    return Ceilings(tuple(found))


def _copies() -> Sequence[Call]:
    ends = torch.empty(2, _COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    return [lambda: ends[1].copy_(ends[0]), lambda: ends[0].copy_(ends[1])]


def _reads() -> Sequence[Call]:
    values = normal(_COPY_BYTES // 2, seed=0).view(2, 16384, -1)
    return [lambda half=half: half.amax(-1) for half in values]  # type: ignore[misc]


def _products() -> Sequence[Call]:
    a, b = normal(_EDGE, _EDGE, seed=1), normal(_EDGE, _EDGE, seed=2)
    return [lambda: a @ b.T, lambda: b @ a.T]


def _launches() -> Sequence[Call]:
    one = torch.zeros(1, device="cuda")
    return [lambda: one.add_(1.0)] * 8


_CEILINGS: tuple[tuple[str, str, str, float, Callable[[], Sequence[Call]]], ...] = (
    ("copy", "TB/s", "1 GiB from device to device, bytes read and bytes written", 2.0 * _COPY_BYTES, _copies),
    ("read", "TB/s", "largest value of each row, 0.5 GiB a call", _COPY_BYTES / 2.0, _reads),
    ("matrix", "TFLOP/s", f"{_EDGE} cubed, bfloat16, random data, cuBLAS", 2.0 * _EDGE**3, _products),
    ("launch", "us", "one more kernel in a CUDA graph, of one element", 0.0, _launches),
)
