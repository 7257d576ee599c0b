"""NVTX ranges of the domain "kdlab": the stages of rounds and what holds them, for Nsight Systems and Nsight Compute.

    with kdlab.profiling.nvtx_ranges():
        kdlab.generate(pair, prompts)

Stages (`kdlab.kernels.stage`) lie inside the spans "round" and "prefill", where asked for inside "layer 0", "layer 1"
and so on of the target. A captured round launches no kernel by itself: a profiler sees its range and one graph.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kdlab.errors import UnsupportedDevice
from kdlab.kernels.stage import observed
from kdlab.profiling.launches import PREFILL

DOMAIN = "kdlab"
ROUND, LAYER = "round", "layer"
PROFILED, CASE = "profiled", "case "


@contextlib.contextmanager
def nvtx_ranges(*, layers: bool = False) -> Iterator[None]:
    """Push an NVTX range for every stage and span that begins inside.

    Args:
        layers: for each layer of the target too.

    Raises:
        UnsupportedDevice: the package nvtx is not installed.
    """
    ranges = NvtxRanges()
    with observed(ranges, spans=without_layers(ranges, layers)):
        yield


class NvtxRanges:
    """Ranges by name; each name's attributes are made once, as a push with them costs a tenth of a microsecond."""

    def __init__(self) -> None:
        try:
            import nvtx
        except ImportError as error:
            raise UnsupportedDevice("NVTX ranges need the package nvtx: pip install nvtx") from error
        self._domain = nvtx.get_domain(DOMAIN)
        self._ranges: dict[str, _NvtxRange] = {}

    def __call__(self, name: str) -> AbstractContextManager[object]:
        """Return the range of a name; it may be entered again and inside others."""
        if name not in self._ranges:
            self._ranges[name] = _NvtxRange(self._domain, self._domain.get_event_attributes(message=name))
        return self._ranges[name]


class _NvtxRange(AbstractContextManager[object]):
    def __init__(self, domain: Any, attributes: Any) -> None:
        self._domain, self._attributes = domain, attributes

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._domain.pop_range()


def without_layers(
    observer: Callable[[str], AbstractContextManager[object]], layers: bool
) -> Callable[[str], AbstractContextManager[object]]:
    """Return an observer of spans that passes layers by, unless `layers` says otherwise."""
    if layers:
        return observer
    nothing = contextlib.nullcontext()
    return lambda name: nothing if name.startswith(f"{LAYER} ") else observer(name)


@dataclass(frozen=True, slots=True)
class Range:
    """One range that a profiler saw: open on a thread from `start` until before `end`."""

    thread: object
    start: float
    end: float
    name: str


def open_ranges(ranges: Sequence[Range], moments: Sequence[tuple[object, float]]) -> list[list[str]]:
    """Return for each (thread, time) the names of the ranges that are open there then, the outermost first."""
    begins = sorted(ranges, key=lambda found: (found.start, -found.end))
    stacks: dict[object, list[Range]] = {}
    names: list[list[str]] = [[] for _ in moments]
    taken = 0
    for place in sorted(range(len(moments)), key=lambda place: moments[place][1]):
        thread, time = moments[place]
        while taken < len(begins) and begins[taken].start <= time:
            stacks.setdefault(begins[taken].thread, []).append(begins[taken])
            taken += 1
        stacks[thread] = [found for found in stacks.get(thread, []) if found.end > time]
        names[place] = [found.name for found in stacks[thread]]
    return names


def place_of(stack: list[str]) -> dict[str, Any]:
    """Return the columns stage and layer, and in a prefill phase, of what was launched inside these ranges.

    Args:
        stack: names of the domain's open ranges, the outermost first.
    """
    spans = (ROUND, PREFILL, PROFILED)
    stages = [name for name in stack if name not in spans and not name.startswith((CASE, f"{LAYER} "))]
    numbers = [name.removeprefix(f"{LAYER} ") for name in stack if name.startswith(f"{LAYER} ")]
    place: dict[str, Any] = {"stage": stages[-1] if stages else ""}
    if numbers and numbers[-1].isdecimal():
        place["layer"] = int(numbers[-1])
    return place | ({"phase": PREFILL} if PREFILL in stack else {})
