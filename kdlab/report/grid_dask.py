"""The points of a grid over machines: dask.distributed sends them, a lost worker's point goes to another.

What crosses the wire is the task and how it ended; notebooks, results and the models lie on a file system that all
workers share. A scheduler runs whatever code its clients send: keep its port on loopback, on a private network or
behind TLS.
"""

import queue
import socket
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdlab.errors import ArgumentError, UnsupportedDevice
from kdlab.report.done_marker import write_whole
from kdlab.report.grid_local import TICK_S, seen_gpus
from kdlab.report.grid_task import PointEnd, PointTask, record_end, run_point
from kdlab.report.named import PLAN
from kdlab.source import source_sha256

if TYPE_CHECKING:
    from distributed import Client, Future

CONNECT_S = 10.0


def run_over_dask(
    tasks: Sequence[PointTask], scheduler: Any, workers: Callable[[int], None]
) -> Generator[PointEnd | None, None, None]:
    """Run points on the workers of a dask scheduler, one a worker.

    A point whose worker dies goes to another one, until as many workers have died of it as dask allows
    (`distributed.scheduler.allowed-failures`); a point that fails by itself is not tried again. Workers that come later
    take part.

    Args:
        tasks: the points, in order.
        scheduler: an address (`tcp://...`, `tls://...`), or a dask cluster.
        workers: called with the number of workers that are there.

    Yields:
        The end of each point as it comes, and None about every second between. Closing the iterator, or an exception in
        it such as KeyboardInterrupt, tells the workers to stop what they run.

    Raises:
        UnsupportedDevice: dask is not installed.
        ArgumentError: there is no scheduler at the address, or one of its workers runs several points at a time, shares
            a GPU, has another kdlab, or does not see the grid's folder.
    """
    if not tasks:
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise UnsupportedDevice(f"a grid over machines needs `pip install 'kdlab[cluster]'` ({error})") from error
    try:
        client = Client(scheduler, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ArgumentError("scheduler", f"a dask scheduler that answers within {CONNECT_S:g} s", scheduler) from error
    with client:
        workers(_check_workers(client, Path(tasks[0].folder)))
        yield from _run(client, tasks)


def _run(client: "Client", tasks: Sequence[PointTask]) -> Generator[PointEnd | None, None, None]:
    ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
    left: dict[str, tuple[PointTask, Future]] = {}
    # Points go out in the grid's order. The key is new in every call: dask must not answer from an earlier one.
    for i, task in enumerate(tasks):
        key = f"{task.session}-{task.name}"
        left[key] = task, client.submit(run_on_worker, task, key=key, pure=False, priority=-i)
    for _, future in left.values():
        future.add_done_callback(ended.put)
    try:
        while left:
            try:
                future = ended.get(timeout=TICK_S)
            except queue.Empty:
                yield None
                continue
            task, _ = left.pop(str(future.key))
            yield _end(task, future)
    finally:
        if left:
            write_whole(next(iter(left.values()))[0].stop_file, "")
            client.cancel([future for _, future in left.values()])


def run_on_worker(task: PointTask) -> PointEnd:
    """Run one point in a dask worker."""
    from distributed import get_worker

    worker = get_worker()
    _refuse_shared(str(worker.address), worker.state.nthreads)
    place = f"{worker.address} on {socket.gethostname()}"
    # The worker's own CUDA_VISIBLE_DEVICES holds: whoever started it, Slurm for example, gave it its GPU.
    return run_point(task, place, {}, task.stop_file.exists, lambda line: None)


def _end(task: PointTask, future: "Future") -> PointEnd:
    if future.status == "finished":
        return future.result()
    if future.status == "error":
        error = future.exception()
        end = PointEnd(task.name, "failed", problem=f"{type(error).__name__}: {error}")
        record_end(task, end)
        return end
    return PointEnd(task.name, "stopped", problem="the scheduler is gone, or dropped the point")


def _check_workers(client: "Client", folder: Path) -> int:
    """Refuse workers that cannot be right; returns how many there are."""
    threads = {address: facts["nthreads"] for address, facts in client.scheduler_info(n_workers=-1)["workers"].items()}
    for address, count in threads.items():
        _refuse_shared(address, count)
    owners: dict[tuple[str, str], str] = {}
    for address, facts in client.run(worker_facts, str(folder), on_error="return").items():
        if isinstance(facts, BaseException):
            raise ArgumentError("scheduler", "workers that can import this kdlab", f"{address}: {facts!r}")
        if not facts["sees"]:
            raise ArgumentError("folder", "a folder that every worker sees", f"{folder}, which {address} does not")
        if facts["source"] != source_sha256():
            raise ArgumentError("scheduler", "workers with the code of this kdlab", f"other code on {address}")
        for gpu in facts["gpus"]:
            owner = owners.setdefault((facts["host"], gpu), address)
            if owner != address:
                got = f"GPU {gpu} of {facts['host']} for {owner} and {address}"
                raise ArgumentError("scheduler", "workers started with CUDA_VISIBLE_DEVICES, a GPU each", got)
    return len(threads)


def worker_facts(folder: str) -> dict[str, Any]:
    """Describe the worker that this runs in."""
    sees = (Path(folder) / PLAN).is_file()
    return {"sees": sees, "source": source_sha256(), "host": socket.gethostname(), "gpus": seen_gpus()}


def _refuse_shared(address: str, threads: int) -> None:
    if threads != 1:
        raise ArgumentError("scheduler", "workers started with --nthreads 1", f"{threads} threads on {address}")
