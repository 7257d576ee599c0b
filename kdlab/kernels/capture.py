"""Capture of CUDA graphs."""

import contextlib
import gc
from collections.abc import Callable, Sequence

import torch


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Capture calls, in order, in one graph on the current GPU; the outputs of all of them stay apart.

    Not by torch.cuda.graph, whose garbage collection and emptied cache cost more than many a whole graph.

    Args:
        calls: capturable, at least one. The first runs once before the capture, and compiles what it needs then; what
            the others launch besides has to be there.

    Returns:
        The graph; it replays with the addresses that the calls hold, and owns none of that memory.
    """
    graph, stream, kept = torch.cuda.CUDAGraph(), torch.cuda.Stream(), []
    random = torch.cuda.default_generators[torch.cuda.current_device()]
    random_before = random.clone_state()
    collecting = gc.isenabled()
    torch.cuda.synchronize()
    gc.disable()  # a graph that the collector frees during a capture breaks it
    try:
        with torch.cuda.stream(stream):
            calls[0]()  # libraries make their workspace of this stream
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                kept = [call() for call in calls]
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture has failed too, and would hide why
                    graph.capture_end()
                # torch leaves the generator in capture mode then, and the next random number would raise.
                random.graphsafe_set_state(random_before)
                raise
            graph.capture_end()
    finally:
        del kept
        if collecting:
            gc.enable()
    torch.cuda.synchronize()
    return graph
