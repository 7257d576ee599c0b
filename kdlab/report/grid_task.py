"""One point of a grid, run where it is sent: a thread of this process, or a worker on another machine."""

import contextlib
import json
import re
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError, KdlabError
from kdlab.report.done_marker import write_whole
from kdlab.report.named import PLAN
from kdlab.report.notebook_file import read_notebook_json
from kdlab.report.outcome import PARTIAL_SUFFIX
from kdlab.report.runner import run_notebook

STOPPED = ".stopped."
FAILED_SUFFIX = ".failed.json"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class PointTask:
    """All that a worker has to know of a point; paths are absolute, and the same for every worker.

    `session` names the call that sent it: once the file `.stopped.<session>` lies in `folder`, its points end.
    """

    name: str
    parameters: dict[str, Any]
    notebook: str
    folder: str
    session: str
    timeout_s: float | None
    cell_timeout_s: float | None

    @property
    def output(self) -> Path:
        """The executed notebook, in a folder that no other point writes to."""
        return Path(self.folder) / self.name / Path(self.notebook).name

    @property
    def stop_file(self) -> Path:
        """The file that ends every point of this call."""
        return Path(self.folder) / f"{STOPPED}{self.session}"


@dataclass(frozen=True, slots=True)
class PointEnd:
    """How a point ended: `status` is done, failed or stopped; `skipped` says that it was done before."""

    name: str
    status: str
    seconds: float | None = None
    problem: str | None = None
    traceback: str | None = None
    skipped: bool = False
    place: str | None = None


def run_point(
    task: PointTask,
    place: str,
    environment: Mapping[str, str],
    stop: Callable[[], bool],
    progress: Callable[[str], None],
) -> PointEnd:
    """Run one point unless it is done; whatever goes wrong is recorded beside its partial notebook, and returned.

    Args:
        task: the point.
        place: where it runs, in words.
        environment: set in the notebook's process, CUDA_VISIBLE_DEVICES for example.
        stop: asked about twice a second; True ends the point unfinished.
        progress: called with a line of text now and then.
    """
    started = time.monotonic()
    try:
        if not (Path(task.folder) / PLAN).is_file():
            expected = f"the grid's folder, shared by all workers, at {task.folder}"
            raise ArgumentError("folder", expected, f"none on {place}")
        run = run_notebook(
            task.notebook,
            task.parameters,
            task.output,
            timeout_s=task.timeout_s,
            cell_timeout_s=task.cell_timeout_s,
            skip_done=True,
            progress=progress,
            environment=environment,
            stop=stop,
        )
    except Exception as error:  # one point never ends the grid
        status = "stopped" if stop() else "failed"
        said = str(error) if isinstance(error, KdlabError) else f"{type(error).__name__}: {error}"
        trace = notebook_traceback(task.output.with_suffix(PARTIAL_SUFFIX))
        if trace is None and not isinstance(error, KdlabError):
            trace = traceback.format_exc()
        end = PointEnd(task.name, status, time.monotonic() - started, said, trace, place=place)
        record_end(task, end)
        return end
    end = PointEnd(task.name, "done", run.seconds, skipped=run.skipped, place=place)
    record_end(task, end)
    return end


def record_end(task: PointTask, end: PointEnd) -> None:
    """Write what went wrong beside the point's partial notebook; of a point that is done no such file stays."""
    path = task.output.with_suffix(FAILED_SUFFIX)
    with contextlib.suppress(OSError):  # the folder cannot be written, which `end` says already
        if end.status == "failed":
            facts: dict[str, Any] = {"parameters": task.parameters, "problem": end.problem, "traceback": end.traceback}
            facts |= {"seconds": end.seconds, "place": end.place}
            write_whole(path, json.dumps(facts, indent=1) + "\n")
        elif end.status == "done":
            path.unlink(missing_ok=True)


def notebook_traceback(path: Path) -> str | None:
    """Return the traceback of the cell that failed in a partial notebook, None where there is none."""
    try:
        cells = read_notebook_json(path)["cells"]
    except (OSError, ArgumentError):
        return None
    outputs = (output for cell in cells for output in cell.get("outputs", []))
    for output in outputs:
        if output["output_type"] == "error":
            return _COLOURS.sub("", "\n".join(output.get("traceback", [])))
    return None
