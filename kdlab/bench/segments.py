"""Stages of a round timed alone, with the very kernels of the round: its work is captured once, stage by stage.

While a call is captured under `record_segments`, every mark of `kdlab.kernels.stage` notes the nodes that the stream
then waits for: they and all before them, without those of earlier marks, are a piece of the stage that just ended. A
stage alone is the whole graph without the nodes of all others, its pieces, 61 of them for a layer's part, one behind
the other. A kernel that overlapped the one ahead of it in the round (programmatic dependent launch) overlaps the one
that is ahead of it then. What is launched outside of all stages is the stage "other".
"""

import contextlib
import functools
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
    edges: list[Edge]
    pieces: list[tuple[str, list[int]]]
    result: object = None  # of the call; its tensors hold what the last replay wrote

    @functools.cached_property
    def kernels(self) -> set[int]:
        """The nodes that are kernels."""
        from cuda.bindings import runtime

        kernel = runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel
        nodes = [node for _, piece in self.pieces for node in piece]
        return {node for node in nodes if _checked(runtime.cudaGraphNodeGetType(_handle(node))) == kernel}

    def replay(self, until: str | None = None) -> None:
        """Run the call again: all of it, or what comes before the first piece of a stage.

        Memory that a call is done with serves what comes later, so a stage alone finds its inputs only right after what
        comes before it.
        """
        before = list(takewhile(lambda piece: piece[0] != until, self.pieces))
        if len(before) == len(self.pieces):
            self.graph.replay()
        elif before:
            Chain(self, [nodes for _, nodes in before])()

    def stages(self) -> list[str]:
        """Return the names of the stages in the order of their first launch."""
        return list(dict.fromkeys(name for name, _ in self.pieces))

    def chain(self, name: str) -> "Chain":
        """Return a call that runs all pieces of one stage as one graph on torch's current stream."""
        return Chain(self, [nodes for stage, nodes in self.pieces if stage == name])


def joints(pieces: Sequence[Sequence[int]], edges: Sequence[Edge], kernels: Collection[int]) -> list[Edge]:
    """Return the edges that put pieces one behind the other, where the graph does not have them.

    Args:
        pieces: nodes, in the order of their launches.
        edges: of the whole graph, from which all nodes of no piece are taken out.
        kernels: the nodes that are kernels; behind others no programmatic edge may begin.
    """
    before: dict[int, set[int]] = {}
    behind: dict[int, set[int]] = {}
    for node, later, _ in edges:
        before.setdefault(later, set()).add(node)
        behind.setdefault(node, set()).add(later)
    programmatic = {later: data for _, later, data in edges if data is not None}
    found = []
    for ahead, piece in pairwise(map(set, pieces)):
        ends = sorted(node for node in ahead if ahead.isdisjoint(behind.get(node, ())))
        for start in sorted(node for node in piece if piece.isdisjoint(before.get(node, ()))):
            alone = len(ends) == 1 and ends[0] in kernels
            new = (end for end in ends if end not in before.get(start, ()))
            found += [(end, start, programmatic.get(start) if alone else None) for end in new]
    return found


class _Recorder:
    """Observer that notes, at every mark, the stage that ended and the nodes that the stream then waits for."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self.name = stream, OTHER
        self.marks: list[tuple[str, list[int]]] = []

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
        self.marks.append((self.name, [int(node) for node in captured[3] or []]))
        self.name = name


def pieces_of(marks: Sequence[tuple[str, Sequence[int]]], edges: Sequence[Edge]) -> list[tuple[str, list[int]]]:
    """Return the nodes of each piece, without the pieces that have none.

    Args:
        marks: where each piece ended: its stage, and the nodes that what comes next waits for.
        edges: of the whole graph.
    """
    ahead: dict[int, list[int]] = {}
    for node, behind, _ in edges:
        ahead.setdefault(behind, []).append(node)
    pieces, seen = [], set()
    for name, last in marks:
        piece, todo = [], list(last)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                piece.append(node)
                todo += ahead.get(node, ())
        if piece:
            pieces.append((name, piece[::-1]))
    return pieces


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
    edges = _edges(graph.raw_cuda_graph())
    return Segments(graph, edges, pieces_of(recorder.marks, edges), result)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # "The CUDA Graph is empty"
        graph.capture_end()


def _checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error) != 0:
        raise KdlabError(f"CUDA graph: {error}")
    return values[0] if len(values) == 1 else values


def _handle(node: int) -> Any:
    from cuda.bindings import runtime

    return runtime.cudaGraphNode_t(node)


def _edges(graph: Any) -> list[Edge]:
    from cuda.bindings import runtime

    count = _checked(runtime.cudaGraphGetEdges(graph))[3]
    ahead, behind, data, _ = _checked(runtime.cudaGraphGetEdges(graph, count))
    found = zip(ahead, behind, data, strict=True)
    return [(int(node), int(other), each if each.type else None) for node, other, each in found]


class Chain:
    """An executable graph of some pieces of a captured one, run once a call or `repeated`."""

    def __init__(self, segments: Segments, pieces: list[list[int]]) -> None:
        """Take a copy of the graph and drop the nodes of all other pieces from it."""
        from cuda.bindings import runtime

        self._runtime, self._segments = runtime, segments  # which hold the memory
        self._executables: list[Any] = []
        self._graph = _checked(runtime.cudaGraphClone(runtime.cudaGraph_t(segments.graph.raw_cuda_graph())))
        kept, twins = {node for piece in pieces for node in piece}, {}
        for node in (node for _, piece in segments.pieces for node in piece):
            twin = _checked(runtime.cudaGraphNodeFindInClone(_handle(node), self._graph))
            if node in kept:
                twins[node] = twin
            else:
                _checked(runtime.cudaGraphDestroyNode(twin))
        for ahead, behind, data in joints(pieces, segments.edges, segments.kernels):
            how = [data or runtime.cudaGraphEdgeData()]
            _checked(runtime.cudaGraphAddDependencies(self._graph, [twins[ahead]], [twins[behind]], how, 1))
        self._executables.append(_checked(runtime.cudaGraphInstantiate(self._graph, 0)))

    def __call__(self) -> None:
        """Run the pieces, as often as they were `repeated`."""
        stream = torch.cuda.current_stream().cuda_stream
        _checked(self._runtime.cudaGraphLaunch(self._executables[-1], stream))

    def repeat(self, times: int) -> None:
        """Let a call run the pieces so many times, one behind the other in one graph."""
        runtime = self._runtime
        whole = _checked(runtime.cudaGraphCreate(0))
        last: list[Any] = []
        for _ in range(times):
            last = [_checked(runtime.cudaGraphAddChildGraphNode(whole, last, len(last), self._graph))]
        self._executables.append(_checked(runtime.cudaGraphInstantiate(whole, 0)))
        _checked(runtime.cudaGraphDestroy(whole))

    def __del__(self) -> None:
        if hasattr(self, "_graph"):
            for executable in self._executables:
                self._runtime.cudaGraphExecDestroy(executable)
            self._runtime.cudaGraphDestroy(self._graph)
