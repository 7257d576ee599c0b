"""The points of a grid on this machine: one notebook process a GPU, or several on the CPU."""

import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path

from kdlab.errors import ArgumentError
from kdlab.report.grid_task import PointEnd, PointTask, run_point

TICK_S = 1.0
_GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")  # where none is there, torch need not be loaded to ask
Places = Mapping[str, Mapping[str, str]]
"""Where points run, in words, and the environment of the notebook's process there."""


def local_places(workers: int | None = None, gpus: Sequence[str] | None = None) -> dict[str, dict[str, str]]:
    """Return the places of this machine, each for one point at a time.

    Args:
        workers: processes on the CPU, from which every GPU is hidden.
        gpus: names as CUDA_VISIBLE_DEVICES takes them; None, without `workers`, is every GPU that this process sees,
            or one process on the CPU where there is none.

    Raises:
        ArgumentError: both are given, `workers` is below 1, or a GPU comes twice or is none that this process sees.
    """
    if workers is not None and gpus is not None:
        raise ArgumentError("workers", "either workers on the CPU or gpus", "both")
    seen = seen_gpus() if workers is None else []
    chosen = list(seen if gpus is None else gpus)
    for gpu in chosen:
        if gpu not in seen or chosen.count(gpu) > 1:
            raise ArgumentError("gpus", f"each one of {', '.join(seen) or 'none: there is no GPU'}, once", gpu)
    if gpus is not None and not chosen:
        raise ArgumentError("gpus", "at least one", "none")
    if chosen:
        return {f"GPU {gpu}": {"CUDA_VISIBLE_DEVICES": gpu} for gpu in chosen}
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ArgumentError("workers", "a whole number of at least 1", repr(workers))
    return {f"CPU worker {i}": {"CUDA_VISIBLE_DEVICES": ""} for i in range(workers or 1)}


def seen_gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    if not any(Path(node).exists() for node in _GPU_NODES):
        return []
    from kdlab.config import visible_gpus

    return visible_gpus()


def run_here(
    tasks: Sequence[PointTask], places: Places, say: Callable[[str, str], None]
) -> Generator[PointEnd | None, None, None]:
    """Run points at `places`, the next one wherever a place is free.

    Args:
        tasks: the points, in order.
        places: see `local_places`.
        say: called with a point's name and a line about it, from several threads.

    Yields:
        The end of each point as it comes, and None about every second between. Closing the iterator, or an exception in
        it such as KeyboardInterrupt, stops what runs and waits until it is gone.
    """
    waiting: queue.SimpleQueue[PointTask] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    ends: queue.SimpleQueue[PointEnd] = queue.SimpleQueue()
    stop = threading.Event()

    def work(place: str) -> None:
        while not stop.is_set():
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                end = run_point(task, place, places[place], stop.is_set, partial(say, task.name))
            except BaseException as error:  # the grid would wait for ever for a point whose thread is gone
                end = PointEnd(task.name, "failed", problem=f"{type(error).__name__}: {error}", place=place)
            ends.put(end)

    threads = [threading.Thread(target=work, args=(place,)) for place in list(places)[: len(tasks)]]
    for thread in threads:
        thread.start()
    try:
        for _ in tasks:
            yield from _next(ends)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _next(ends: "queue.SimpleQueue[PointEnd]") -> Generator[PointEnd | None, None, None]:
    while True:
        try:
            yield ends.get(timeout=TICK_S)
            return
        except queue.Empty:
            yield None
