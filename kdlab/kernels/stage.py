"""Names for the stages of a round: marked where the work is launched, observed by benchmarks and profilers."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Observer = Callable[[str], AbstractContextManager[object]]

_UNOBSERVED = contextlib.nullcontext()
_observers: list[Observer] = []
_span_observers: list[Observer] = []


def stage(name: str) -> AbstractContextManager[object]:
    """Mark the work launched inside as a stage, named as in `kdlab.study.step_cost`; stages do not nest."""
    return _observers[-1](name) if _observers else _UNOBSERVED


def span(name: str, number: int | None = None) -> AbstractContextManager[object]:
    """Mark a stretch that holds stages: a "round", a "prefill", or one target "layer" by its number; spans nest."""
    if not _span_observers:
        return _UNOBSERVED
    return _span_observers[-1](name if number is None else f"{name} {number}")


@contextlib.contextmanager
def observed(observer: Observer, spans: Observer | None = None) -> Iterator[None]:
    """Call observers with the name of everything that begins inside; what they return is held until it ends.

    Args:
        observer: of stages.
        spans: of spans; None leaves those alone.
    """
    _observers.append(observer)
    if spans is not None:
        _span_observers.append(spans)
    try:
        yield
    finally:
        _observers.remove(observer)
        if spans is not None:
            _span_observers.remove(spans)
