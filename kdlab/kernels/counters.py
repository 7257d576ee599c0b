"""Counters in device memory that kernels leave zero: their blocks tell one another by them what is done."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

_SETS = 4096
"""Calls that may be under way at once, those of captured graphs included, before two share counters."""

_rings: dict[tuple[torch.device, int], tuple[Tensor, Iterator[int]]] = {}


def zero_counters(device: torch.device, count: int) -> Tensor:
    """Return counters that are zero: the kernel leaves them so, and calls take turns with the sets of a ring.

    A captured call keeps its set for every replay; replays of one graph follow one another. A launch that a fault cuts
    short may leave other values: CUDA gives the process no further launch then.

    Args:
        device: a CUDA device.
        count: how many.

    Returns:
        [count] int32.
    """
    key = (device, count)
    if key not in _rings:
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=device)
        # Filled on a stream of its own: nothing that is under way need end first, and every stream may use it then.
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            ring = torch.zeros(_SETS, count, dtype=torch.int32, device=device)
        side.synchronize()
        _rings.setdefault(key, (ring, itertools.count()))  # another thread may have been quicker
    ring, turns = _rings[key]
    return ring[next(turns) % _SETS]
