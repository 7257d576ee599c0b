"""The child process of one notebook run, watched from outside: its events, its time limit, its end."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kdlab.report import kernel_process
from kdlab.report.notebook_file import read_notebook_json
from kdlab.report.params import INJECTED_TAG

HEARTBEAT_S = 5.0  # the longest silence of a run
STOP_CHECK_S = 0.5  # a run that is told to stop ends within about this time
LOG_TAIL = 300  # characters of the child's own output that an error quotes


@dataclass(frozen=True, slots=True)
class NotebookJob:
    """What a child process is asked to run; `run` starts it, watches it, and leaves nothing behind but the notebook.

    `output` holds a copy of the notebook and is executed in place; `notebook` gives its name and folder. `environment`
    is set in the child and so in the kernel; `stop` is asked now and then whether to end the run; `held` are file
    descriptors that the child keeps open, so that a lock on them lasts as long as anything of the run does.
    """

    notebook: Path
    parameters: dict[str, Any]
    output: Path
    cell_timeout_s: float | None
    timeout_s: float | None
    environment: Mapping[str, str] = field(default_factory=dict)
    stop: Callable[[], bool] | None = None
    held: tuple[int, ...] = ()

    def run(self, progress: Callable[[str], None]) -> str | None:
        """Execute and wait; returns what went wrong with the process, or None."""
        with tempfile.TemporaryDirectory(prefix="kdlab-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            with (folder / "log").open("w+b") as log:
                child = self._start(folder, log)
                try:
                    return self._watch(child, log, progress)
                finally:
                    _end_groups(child, folder)

    def _start(self, folder: Path, log: IO[bytes]) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-P", kernel_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            pass_fds=self.held,
        )
        job = {
            "folder": str(folder),
            "output": str(self.output.resolve()),
            "parameters": self.parameters,
            "environment": dict(self.environment),
            "cwd": str(self.notebook.resolve().parent),
            # papermill counts whole seconds
            "cell_timeout_s": None if self.cell_timeout_s is None else max(1, round(self.cell_timeout_s)),
            "package_root": str(Path(__file__).resolve().parents[2]),
        }
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: the watcher sees that
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
        return child

    def _watch(self, child: subprocess.Popen[str], log: IO[bytes], progress: Callable[[str], None]) -> str | None:
        events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=_read_events, args=(child, events), daemon=True).start()
        started = said = time.monotonic()
        where, error = "starting the kernel", None
        cells = _count_cells(self.output)
        while True:
            spent = time.monotonic() - started
            left = float("inf") if self.timeout_s is None else self.timeout_s - spent
            if left <= 0:
                return f"the run passed its limit of {self.timeout_s:g} s while {where}"
            if self.stop is not None and self.stop():
                return f"the run was stopped while {where}"
            if time.monotonic() - said >= HEARTBEAT_S:
                said = time.monotonic()
                progress(f"{self.notebook.name}: {where}, {spent:.0f} s")
            try:
                event = events.get(timeout=min(HEARTBEAT_S, STOP_CHECK_S, left))
            except queue.Empty:
                continue
            if event is None:
                return _end_problem(child, error, where, log)
            if "cell" in event:
                where = f"running cell {event['cell']} of {cells}"
                progress(f"{self.notebook.name}: {where}, {spent:.0f} s")
            error = event.get("error", error)


def _count_cells(notebook: Path) -> int:
    cells = read_notebook_json(notebook)["cells"]
    return sum(INJECTED_TAG not in cell.get("metadata", {}).get("tags", []) for cell in cells)


def _read_events(child: subprocess.Popen[str], events: "queue.Queue[dict[str, Any] | None]") -> None:
    assert child.stdout is not None
    for line in child.stdout:
        events.put(json.loads(line))
    events.put(None)


def _end_problem(child: subprocess.Popen[str], error: str | None, where: str, log: IO[bytes]) -> str | None:
    status = child.wait()
    if status == 0:
        return None
    if error:
        return f"{error} while {where}"
    if status < 0:
        return f"the process was killed ({signal.Signals(-status).name}) while {where}"
    log.seek(0)
    tail = log.read().decode(errors="replace").strip()[-LOG_TAIL:]
    return f"the process ended with status {status} while {where}: {tail}"


def _end_groups(child: subprocess.Popen[str], folder: Path) -> None:
    """Kill the child's process group and the kernel's own: whatever a cell started and left goes with them."""
    groups = [child.pid]
    with contextlib.suppress(OSError, ValueError):  # no kernel was started
        groups.append(int((folder / "kernel.pid").read_text()))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
