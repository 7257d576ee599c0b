"""Stages of a round timed alone, with the very kernels of the round: its work is captured once, stage by stage.

While a call is captured under `record_segments`, every mark of `kdlab.kernels.stage` asks for the graph's nodes so far:
the new ones are a piece of the stage that just ended. A stage alone is the whole graph without the nodes of all others,
its pieces, 61 of them for a layer's part, one behind the other. A kernel that overlapped the one ahead of it in the
round (programmatic dependent launch) overlaps the one that is ahead of it then. What is launched outside of all stages
is the stage "other".
"""

import contextlib
import gc
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import torch

from kdlab.bench.timing import require_gpu
from kdlab.errors import KdlabError
from kdlab.kernels.stage import observed
from kdlab.study.recorded_rounds import OTHER

Edge = tuple[int, int, Any]
"""A node, the one that waits for it, and CUDA's data of a programmatic edge, None for a plain one."""


@dataclass(eq=False)
class Segments:
    """One captured call; `pieces` holds (stage, nodes) in their order, `result` is what it returned."""

    graph: torch.cuda.CUDAGraph
    pieces: list[tuple[str, list[int]]]
    result: object = None  # of the call; its tensors hold what the last replay wrote

    def replay(self, until: str | None = None) -> None:
        """Run the call again: all of it, or what comes before the first piece of a stage.

        Memory that a call is done with serves what comes later, so a stage alone finds its inputs only right after what
        comes before it.
        """
        before = list(takewhile(lambda piece: piece[0] != until, self.pieces))
        if len(before) == len(self.pieces):
            self.graph.replay()
        elif before:
            _Part(self.graph, [nodes for _, nodes in before], 1)()

    def stages(self) -> list[str]:
        """Return the names of the stages in the order of their first launch."""
        return list(dict.fromkeys(name for name, _ in self.pieces))

    def chain(self, name: str, times: int = 1) -> Callable[[], None]:
        """Return a call that runs all pieces of one stage, so many times, as one graph on torch's current stream."""
        return _Part(self.graph, [nodes for stage, nodes in self.pieces if stage == name], times)


def joints(pieces: Sequence[Sequence[int]], edges: Sequence[Edge], kernels: Collection[int]) -> list[Edge]:
    """Return the edges that put pieces one behind the other, where the graph does not have them.

    Args:
        pieces: nodes, in the order of their launches.
        edges: of the whole graph, from which all nodes of no piece are taken out.
        kernels: the nodes that are kernels; behind others no programmatic edge may begin.
    """
    there = {(node, behind) for node, behind, _ in edges}
    programmatic = {behind: data for _, behind, data in edges if data is not None}
    found = []
    for ahead, piece in pairwise(map(set, pieces)):
        ends = sorted(ahead - {node for node, behind in there if behind in ahead})
        for start in sorted(piece - {behind for node, behind in there if node in piece}):
            alone = len(ends) == 1 and ends[0] in kernels
            new = (end for end in ends if (end, start) not in there)
            found += [(end, start, programmatic.get(start) if alone else None) for end in new]
    return found


class _Recorder:
    """Observer that gives the nodes which came since the mark before to the stage that ended."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self.name = stream, OTHER
        self.pieces: list[tuple[str, list[int]]] = []
        self.seen: set[int] = set()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.name != OTHER:
            raise KdlabError(f"stage {name!r} begins inside stage {self.name!r}; stages do not nest")
        self.turn(name)
        yield
        self.turn(OTHER)

    def turn(self, name: str) -> None:
        """End the piece under way; the next one belongs to stage `name`."""
        from cuda.bindings import runtime

        captured = _checked(runtime.cudaStreamGetCaptureInfo(runtime.cudaStream_t(self.stream.cuda_stream)))
        new = [node for node in _nodes(captured[2]) if node not in self.seen]
        if new:
            self.pieces.append((self.name, new))
            self.seen.update(new)
        self.name = name


def record_segments(call: Callable[[], object]) -> Segments:
    """Capture `call` with its stages, and run it once.

    Args:
        call: launches work on torch's current stream, with fixed shapes and without a wait; warm it up before.

    Raises:
        UnsupportedDevice: there is no GPU.
        KdlabError: a stage begins inside another one.
    """
    require_gpu("segments")
    graph, stream, collecting = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream(), gc.isenabled()
    recorder = _Recorder(stream)
    torch.cuda.synchronize()
    gc.disable()  # a graph that the collector frees during a capture breaks it
    try:
        with torch.cuda.stream(stream), observed(recorder):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = call()
                recorder.turn(OTHER)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture has failed too, and would hide why
                    _end(graph)
                raise
            _end(graph)
    finally:
        if collecting:
            gc.enable()
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    return Segments(graph, recorder.pieces, result)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # "The CUDA Graph is empty"
        graph.capture_end()


def _checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error) != 0:
        raise KdlabError(f"CUDA graph: {error}")
    return values[0] if len(values) == 1 else values


def _nodes(graph: Any) -> list[int]:
    from cuda.bindings import runtime

    count = _checked(runtime.cudaGraphGetNodes(graph))[1]
    return [int(node) for node in _checked(runtime.cudaGraphGetNodes(graph, count))[0]]


def _edges(graph: Any) -> list[Edge]:
    from cuda.bindings import runtime

    count = _checked(runtime.cudaGraphGetEdges(graph))[3]
    ahead, behind, data, _ = _checked(runtime.cudaGraphGetEdges(graph, count))
    found = zip(ahead, behind, data, strict=True)
    return [(int(node), int(other), each if each.type else None) for node, other, each in found]


class _Part:
    """An executable graph of some pieces of a captured one, run so many times."""

    def __init__(self, captured: torch.cuda.CUDAGraph, pieces: list[list[int]], times: int) -> None:
        from cuda.bindings import runtime

        self._runtime, self._captured = runtime, captured  # which holds the memory
        graph = runtime.cudaGraph_t(captured.raw_cuda_graph())
        clone, nodes, edges = _checked(runtime.cudaGraphClone(graph)), _nodes(graph), _edges(graph)
        handles = {node: runtime.cudaGraphNode_t(node) for node in nodes}
        kernel = runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel
        kernels = {node for node in nodes if _checked(runtime.cudaGraphNodeGetType(handles[node])) == kernel}
        twins = {node: _checked(runtime.cudaGraphNodeFindInClone(handles[node], clone)) for node in nodes}
        for node in set(nodes).difference(*pieces):
            _checked(runtime.cudaGraphDestroyNode(twins[node]))
        for ahead, behind, data in joints(pieces, edges, kernels):
            how = [data or runtime.cudaGraphEdgeData()]
            _checked(runtime.cudaGraphAddDependencies(clone, [twins[ahead]], [twins[behind]], how, 1))
        whole = _checked(runtime.cudaGraphCreate(0))
        last: list[Any] = []
        for _ in range(times):
            last = [_checked(runtime.cudaGraphAddChildGraphNode(whole, last, len(last), clone))]
        self._executable = _checked(runtime.cudaGraphInstantiate(clone if times == 1 else whole, 0))
        _checked(runtime.cudaGraphDestroy(whole))
        _checked(runtime.cudaGraphDestroy(clone))

    def __call__(self) -> None:
        _checked(self._runtime.cudaGraphLaunch(self._executable, torch.cuda.current_stream().cuda_stream))

    def __del__(self) -> None:
        if hasattr(self, "_executable"):
            self._runtime.cudaGraphExecDestroy(self._executable)
