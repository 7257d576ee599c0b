"""What the card at hand can do, measured in the same run: the rates that floors and fractions are made of."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kdlab.bench.kernels.case import normal
from kdlab.bench.rows import summarize_samples
from kdlab.bench.timing import Call, graph_times_us
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit import num_sms
from kdlab.kernels.mma_peak import mma_peak, mma_peak_cost

_BYTES = 1 << 30
_MMA_ROUNDS = 2000
_SECONDS = 0.03


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

    @property
    def mma_flops_per_s(self) -> float:
        """Operations a second of mma.sync alone."""
        return 1e12 * self["mma.sync"]

    def floor_us(self, cost: Cost) -> float:
        """Return the bound of a call: its bytes, its operations, or one kernel that does nothing."""
        return max(cost.floor_us(bytes_per_s=1e12 * self["read"], flops_per_s=1e12 * self["matrix"]), self["launch"])


def measure_ceilings() -> Ceilings:
    """Measure copy and read bandwidth, the matrix rates, and what a kernel costs that does nothing.

    Each for a fraction of a second, the matrix rates first: after some 50 ms of nothing but products the card reaches
    its power limit and slows down by a tenth.
    """
    found = []
    for name, unit, what, work, make in _ceilings():
        times = graph_times_us(make(), seconds=_SECONDS)
        found.append(Ceiling(name, unit, [work / us / 1e6 if work else us for us in times], what))
    return Ceilings(tuple(found))


def _ceilings() -> Iterator[tuple[str, str, str, float, Callable[[], Sequence[Call]]]]:
    """Name, unit, what it is, work of a call in bytes or operations (0: its time counts), and the calls."""
    gpu, edge = torch.device("cuda"), 8192
    yield "matrix", "TFLOP/s", f"{edge} cubed, bfloat16, random data, cuBLAS", 2.0 * edge**3, lambda: _products(edge)
    work = mma_peak_cost(_MMA_ROUNDS, num_sms(gpu)).flops
    yield "mma.sync", "TFLOP/s", "mma.sync of bfloat16 on registers, no memory", work, lambda: _instructions(gpu)
    yield "copy", "TB/s", "1 GiB, bytes read and bytes written", 2.0 * _BYTES, _copies
    yield "read", "TB/s", "the sum of 1 GiB", _BYTES, _reads
    yield "launch", "us", "one more kernel in a CUDA graph, of one element", 0.0, _launches


def _products(edge: int) -> Sequence[Call]:
    a, b = normal(edge, edge, seed=1), normal(edge, edge, seed=2)
    return [lambda: a @ b.T, lambda: b @ a.T]


def _instructions(gpu: torch.device) -> Sequence[Call]:
    sums = torch.zeros(1024 * num_sms(gpu), device=gpu)
    return [lambda: mma_peak(sums, _MMA_ROUNDS)] * 2


def _copies() -> Sequence[Call]:
    """A kernel, as the driver's own copy of 1 GiB runs at two thirds of what a kernel reaches on an H200."""
    ends = [normal(_BYTES // 4, seed=seed, dtype=torch.float32) for seed in range(4)]
    return [lambda: torch.mul(ends[0], 1.0, out=ends[1]), lambda: torch.mul(ends[2], 1.0, out=ends[3])]


def _reads() -> Sequence[Call]:
    ends = [normal(_BYTES // 4, seed=seed, dtype=torch.float32) for seed in range(2)]
    return [lambda: ends[0].sum(), lambda: ends[1].sum()]


def _launches() -> Sequence[Call]:
    one = torch.zeros(1, device="cuda")
    return [lambda: one.add_(1.0)] * 8
