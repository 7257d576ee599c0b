"""A grid: one notebook at many points, side by side, resumable, collected into one table."""

import contextlib
import json
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError, ParameterError
from kdlab.paths import GRID_RESULTS, grid_folder
from kdlab.report.done_marker import is_done, marked_seconds, marker_path, run_fingerprint, write_whole
from kdlab.report.grid_dask import run_over_dask
from kdlab.report.grid_local import Places, local_places, run_here
from kdlab.report.grid_points import check_points, describe
from kdlab.report.grid_progress import GridProgress
from kdlab.report.grid_task import STOPPED, PointEnd, PointTask
from kdlab.report.named import PLAN
from kdlab.report.notebook_file import read_notebook_json
from kdlab.report.output_lock import hold
from kdlab.report.params import TAG, declared_parameters

SAVE_EVERY_S = 30.0  # while points come in, their table on disk is at most this old
STOP_FILES_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class GridRun:
    """How a grid ended: its points in order, each with parameters and end, and the file of their results."""

    name: str
    table: Path
    points: list[tuple[PointTask, PointEnd]]

    @property
    def unfinished(self) -> list[tuple[PointTask, PointEnd]]:
        """The points that are not done."""
        return [(task, end) for task, end in self.points if end.status != "done"]


def run_grid(
    notebook: str | Path,
    points: Sequence[Mapping[str, Any]],
    name: str,
    *,
    folder: str | Path | None = None,
    workers: int | None = None,
    gpus: Sequence[str] | None = None,
    scheduler: Any = None,
    timeout_s: float | None = None,
    cell_timeout_s: float | None = None,
    again: bool = False,
    progress: Callable[[str], None] | None = None,
) -> GridRun:
    """Run `notebook` at every point and collect the result records into one Parquet file; see `kdlab.study.load`.

    Each point has a folder of its own with its executed notebook, figures and tables. A point that is done with the
    same notebook, parameters, code, data and models is not run again; whatever changed runs anew. A point that fails,
    is killed or passes its limit is recorded with its traceback and its partial notebook, and the others go on. A grid
    that is interrupted keeps what is done, and the same call goes on from there. The table holds the points of the last
    call.

    Args:
        notebook: the notebook; it is not changed.
        points: parameter values by name, one mapping a point.
        name: of the grid; letters, digits, `.`, `_` and `-`.
        folder: where the grid's own folder lies; None is the clone's `runs/grids`.
        workers: processes on this machine's CPU.
        gpus: GPUs of this machine, one process each; without `workers` and `gpus` all that there are.
        scheduler: address of a dask scheduler, or a dask cluster, whose workers run the points instead.
        timeout_s: limit of each point, in seconds.
        cell_timeout_s: limit of each cell, in seconds.
        again: run also what is done.
        progress: called with a line of text now and then.

    Returns:
        Every point and how it ended.

    Raises:
        ParameterError: a name is unknown, a value has a wrong type, or two points are the same; nothing has run.
        ArgumentError: another argument has a wrong value, the name belongs to another notebook's grid, or another
            process runs this grid.
        UnsupportedDevice: a scheduler is given and dask is not installed.
        OSError: a file cannot be read or written.
    """
    path, root = Path(notebook).resolve(), grid_folder(name, folder).resolve()
    for argument, limit in {"timeout_s": timeout_s, "cell_timeout_s": cell_timeout_s}.items():
        if limit is not None and not 0 < limit < math.inf:
            raise ArgumentError(argument, "a finite number of seconds above 0, or None", limit)
    if scheduler is not None and (workers is not None or gpus is not None):
        raise ArgumentError("scheduler", "either a scheduler, or workers or gpus of this machine", "both")
    session = uuid.uuid4().hex[:12]
    tasks = [
        PointTask(point, values, str(path), str(root), session, timeout_s, cell_timeout_s)
        for point, values in _checked(path, points).items()
    ]
    places = {} if scheduler is not None else local_places(workers, gpus)
    with hold(root / ".lock", lambda _: _refuse_second(root)):
        _write_state(root, tasks)
        if again:
            for task in tasks:
                marker_path(task.output).unlink(missing_ok=True)
        return _run(name, root, tasks, places, scheduler, progress or (lambda line: None))


def grid_points_done(notebook: str | Path, points: Sequence[Mapping[str, Any]], root: Path) -> list[tuple[str, bool]]:
    """Return the name of each point's folder and whether it is done, running nothing."""
    path = Path(notebook).resolve()
    checked = _checked(path, points)
    return [(point, _is_done(path, values, root / point / path.name)) for point, values in checked.items()]


def _checked(path: Path, points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    declared = declared_parameters(read_notebook_json(path), path.name)
    if declared is None and any(points):
        raise ParameterError(f"{path.name} has no cell tagged {TAG!r}, so it takes no parameters")
    return check_points(points, declared or {})


def _refuse_second(root: Path) -> None:
    raise ArgumentError("name", "a grid that no other process is running", f"one that runs, in {root}")


def _write_state(root: Path, tasks: Sequence[PointTask]) -> None:
    notebook, path = tasks[0].notebook, root / PLAN
    if path.is_file():
        try:
            earlier = json.loads(path.read_text())["notebook"]
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError("name", f"a grid whose {PLAN} is whole", f"{path}, which is broken") from error
        if earlier != notebook:
            got = f"{root.name}, a grid of {earlier}"
            raise ArgumentError("name", f"a new one, or one of a grid of {notebook}", got)
    for old in root.glob(f"{STOPPED}*"):  # a worker may still have to see one of the call that was just interrupted
        if time.time() - old.stat().st_mtime > STOP_FILES_S:
            old.unlink()
    points = {task.name: task.parameters for task in tasks}
    state = {"notebook": notebook, "session": tasks[0].session, "points": points}
    write_whole(path, json.dumps(state, indent=1) + "\n")


def _is_done(notebook: Path, parameters: Mapping[str, Any], output: Path) -> bool:
    # Hashing the inputs takes longer than looking for a marker.
    return marker_path(output).is_file() and is_done(output, run_fingerprint(notebook, parameters))


def _ends_of_done(tasks: Sequence[PointTask]) -> dict[str, PointEnd]:
    return {
        task.name: PointEnd(task.name, "done", marked_seconds(task.output), skipped=True)
        for task in tasks
        if _is_done(Path(task.notebook), task.parameters, task.output)
    }


def _run(
    name: str,
    root: Path,
    tasks: Sequence[PointTask],
    places: Places,
    scheduler: Any,
    progress: Callable[[str], None],
) -> GridRun:
    from kdlab.report.grid_results import save_results  # numpy, pandas and torch come with it

    ends = _ends_of_done(tasks)
    todo = [task for task in tasks if task.name not in ends]
    shown = GridProgress(name, {task.name: describe(task.parameters) for task in tasks}, len(ends), progress)
    if scheduler is None:
        shown.workers(len(places))
        coming = run_here(todo, places, shown.running)
    else:
        coming = run_over_dask(todo, scheduler, shown.workers)
    save_results(name, root, tasks, ends)  # whoever kills this process finds a table, and a full disk is seen now
    saved = time.monotonic()
    try:
        with contextlib.closing(coming):
            for end in coming:
                if end is not None:
                    ends[end.name] = end
                shown(end)
                if end is not None and time.monotonic() - saved > SAVE_EVERY_S:
                    saved = time.monotonic()
                    try:
                        save_results(name, root, tasks, ends)
                    except OSError as error:  # the points go on, and the last table is the one that counts
                        progress(f"{name}: the table could not be written now: {error}")
    except KeyboardInterrupt:
        ends |= _ends_of_done([task for task in todo if task.name not in ends])
        progress(f"{name}: interrupted; what is done is kept, and the same command goes on from there")
        raise
    finally:
        save_results(name, root, tasks, ends)
    return GridRun(name, root / GRID_RESULTS, [(task, ends[task.name]) for task in tasks])
