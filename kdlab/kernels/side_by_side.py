"""Work beside a GPU's current stream: a fork and a join by events, which a capture records as branches of one graph."""

import contextlib
import threading
from collections.abc import Iterator

import torch

_HIGH = -1  # priority: its work takes places ahead of the current stream's; torch keeps these streams in a pool apart


class _Sides(threading.local):
    """A stream a GPU, of each thread its own: another thread's may be under capture."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}


_sides = _Sides()


@contextlib.contextmanager
def side_by_side(device: torch.device) -> Iterator[contextlib.AbstractContextManager[object]]:
    """Run work on a side stream and on the current one; behind the block the current stream goes on when both are done.

        with side_by_side(x.device) as aside:
            with aside:
                ...  # launches on the side stream, behind what was launched before
            ...  # launches beside them
        ...  # launches that may read what both wrote

    Memory has to be allocated before the block: what is allocated aside belongs to the side stream, which may give it
    to other work while the current stream still reads it. A library's workspace aside is one for all graphs and streams
    of a thread: they may not run at once.

    Args:
        device: the GPU of the work, an indexed one.
    """
    main = torch.cuda.current_stream(device)
    side = _sides.streams.get(device)
    if side is None:
        side = _sides.streams[device] = torch.cuda.Stream(device, priority=_HIGH)
    side.wait_event(main.record_event())
    try:
        yield torch.cuda.stream(side)
    finally:
        main.wait_event(side.record_event())
