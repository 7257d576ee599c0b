"""Stages of a round timed alone, with the very kernels of the round: its work is captured stage by stage.

While a call runs under `record_segments`, everything between two marks of `kdlab.kernels.stage` is captured as a graph
of its own and replayed at once, so that the next stage finds its inputs. The graphs of one stage, 61 of them for a
layer's part, are then chained into one graph. What is launched outside of all stages is the stage "other".
"""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kdlab.bench.timing import require_gpu
from kdlab.errors import KdlabError
from kdlab.kernels.stage import observed
from kdlab.study.step_fit import OTHER


@dataclass(eq=False)
class Segments:
    """Captured pieces of one call in the order of their launches; `pieces` holds (stage, graph)."""

    pieces: list[tuple[str, torch.cuda.CUDAGraph]] = field(default_factory=list)
    result: object = None  # of the call; its tensors hold what the last replay wrote
    kept: list[torch.cuda.CUDAGraph] = field(default_factory=list)

    def replay(self, until: str | None = None) -> None:
        """Run the call again, piece by piece: all of it, or what comes before the first piece of a stage.

        Memory that a call is done with serves what comes later, so a stage alone finds its inputs only right after what
        comes before it.
        """
        for name, graph in self.pieces:
            if name == until:
                break
            graph.replay()

    def stages(self) -> list[str]:
        """Return the names of the stages in the order of their first launch."""
        return list(dict.fromkeys(name for name, _ in self.pieces))

    def chain(self, name: str, times: int = 1) -> Callable[[], None]:
        """Return a call that runs all pieces of one stage, so many times, as one graph on torch's current stream."""
        return _Chain([graph for stage, graph in self.pieces if stage == name] * times)


class _Recorder:
    """Observer that ends the piece under way and begins the next one at every mark."""

    def __init__(self, segments: Segments) -> None:
        self.segments, self.pool, self.name = segments, torch.cuda.graph_pool_handle(), OTHER
        self.graph: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.name != OTHER:
            raise KdlabError(f"stage {name!r} begins inside stage {self.name!r}; stages do not nest")
        self.end()
        self.begin(name)
        try:
            yield
        finally:
            self.end()
            self.begin(OTHER)

    def begin(self, name: str) -> None:
        self.name = name
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")

    def end(self) -> None:
        if self.graph is None:
            return
        graph, self.graph = self.graph, None
        self.segments.kept.append(graph)  # the pool lives as long as a graph that used it, an empty one included
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # "The CUDA Graph is empty"
            graph.capture_end()
        if _num_nodes(graph):
            graph.instantiate()
            graph.replay()
            self.segments.pieces.append((self.name, graph))


def record_segments(call: Callable[[], object]) -> Segments:
    """Run `call` once, captured stage by stage.

    Args:
        call: launches work on torch's current stream, with fixed shapes and without a wait; warm it up before.

    Raises:
        UnsupportedDevice: there is no GPU.
        KdlabError: a stage begins inside another one.
    """
    require_gpu("segments")
    segments, collecting = Segments(), gc.isenabled()
    recorder = _Recorder(segments)
    torch.cuda.synchronize()
    gc.disable()  # a graph that the collector frees during a capture breaks it
    try:
        with torch.cuda.stream(torch.cuda.Stream()), observed(recorder):
            recorder.begin(OTHER)
            try:
                segments.result = call()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture has failed too, and would hide why
                    recorder.end()
                raise
            recorder.end()
    finally:
        if collecting:
            gc.enable()
    torch.cuda.synchronize()
    return segments


def _checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error) != 0:
        raise KdlabError(f"CUDA graph: {error}")
    return values[0] if len(values) == 1 else values


def _num_nodes(graph: torch.cuda.CUDAGraph) -> int:
    from cuda.bindings import runtime

    found = _checked(runtime.cudaGraphGetNodes(runtime.cudaGraph_t(graph.raw_cuda_graph())))
    return int(found[1] if isinstance(found, list) else found)


class _Chain:
    """One executable graph of several captured ones, each after the one before."""

    def __init__(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        from cuda.bindings import runtime

        self._runtime, self._graphs = runtime, graphs
        whole, last = _checked(runtime.cudaGraphCreate(0)), None
        for graph in graphs:
            child = runtime.cudaGraph_t(graph.raw_cuda_graph())
            after: list[Any] = [] if last is None else [last]
            last = _checked(runtime.cudaGraphAddChildGraphNode(whole, after, len(after), child))
        self._executable = _checked(runtime.cudaGraphInstantiate(whole, 0))
        _checked(runtime.cudaGraphDestroy(whole))

    def __call__(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        _checked(self._runtime.cudaGraphLaunch(self._executable, stream))

    def __del__(self) -> None:
        if hasattr(self, "_executable"):
            self._runtime.cudaGraphExecDestroy(self._executable)
