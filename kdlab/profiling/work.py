"""What is profiled: a piece of work that can be run again, made by the benchmarks; and names as tables have them."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol


class Work(Protocol):
    """One round, prefill or op at one size.

    Attributes:
        subject: "round" or "kernels".
        case: in words, of one run no two alike.
        sizes: rows, streams, context and layers, as far as they apply.
        simulated: its weights are random.
        capture: puts `run` into a CUDA graph and returns what replays it; None where that makes no sense.
    """

    @property
    def subject(self) -> str: ...
    @property
    def case(self) -> str: ...
    @property
    def sizes(self) -> Mapping[str, int | None]: ...
    @property
    def simulated(self) -> bool: ...
    @property
    def capture(self) -> Callable[[], Callable[[], object]] | None: ...

    def prepare(self) -> None:
        """Bring the state back to where `run` begins; not profiled."""

    def run(self) -> object:
        """Launch the work, marked with stages, on torch's current stream."""


class Subject(Protocol):
    """Pieces of work, made one after another, and the provenance that they share."""

    @property
    def works(self) -> Iterable[Work]: ...
    @property
    def provenance(self) -> Mapping[str, Any]: ...


def columns_of(work: Work) -> dict[str, Any]:
    """Return the columns of a launch that say which work it belongs to."""
    return {"subject": work.subject, "case": work.case, "simulated": work.simulated, **work.sizes}


def kernel_name(text: str) -> str:
    """Return a kernel's name without return type, template arguments and parameters."""
    name, nested = re.sub(r"(\(anonymous namespace\)|<unnamed>)::", "", text), re.compile(r"<[^<>]*>")
    while nested.search(name):
        name = nested.sub("", name)
    return (name.partition("(")[0].split() or [text])[-1]


def triple(sizes: object) -> str | None:
    """Return "x, y, z" of a grid or a block, from a list of three or from "(x, y, z)"; None of anything else."""
    found = re.findall(r"\d+", str(sizes))
    return ", ".join(found) if len(found) == 3 else None
