"""Names for the stages of a round: marked where the work is launched, observed by benchmarks and profilers."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Observer = Callable[[str], AbstractContextManager[object]]

_UNOBSERVED = contextlib.nullcontext()
_observers: list[Observer] = []


def stage(name: str) -> AbstractContextManager[object]:
    """Mark the work launched inside as a stage, named as in `kdlab.study.step_cost`; stages do not nest."""
    return _observers[-1](name) if _observers else _UNOBSERVED


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call `observer` with the name of every stage that begins inside; what it returns is held for the stage."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
