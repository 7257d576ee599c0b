"""Run one notebook with parameters: in a process group of its own, whole or not at all."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError, NotebookError, ParameterError
from kdlab.report.done_marker import is_done, marked_seconds, run_fingerprint, write_marker
from kdlab.report.notebook_file import read_notebook_json
from kdlab.report.notebook_job import HEARTBEAT_S, NotebookJob
from kdlab.report.outcome import PARTIAL_SUFFIX, read_outcome
from kdlab.report.output_lock import POLL_S, hold
from kdlab.report.params import TAG, bind_parameters, declared_parameters
from kdlab.report.placement import folder_parameters, output_path


@dataclass(frozen=True, slots=True)
class NotebookRun:
    """A finished run: the executed notebook, its last result record, its wall time, and whether it was there before."""

    output: Path
    record: dict[str, Any]
    seconds: float
    skipped: bool


def run_notebook(
    path: str | Path,
    parameters: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    *,
    timeout_s: float | None = None,
    cell_timeout_s: float | None = None,
    skip_done: bool = False,
    progress: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
    stop: Callable[[], bool] | None = None,
) -> NotebookRun:
    """Execute the notebook at `path` and write it, with its outputs, to `output`.

    The kernel is this interpreter, started in the notebook's folder as JupyterLab does. `output` appears only when
    the run is complete: no error, every code cell completed, a last result record with `final: True`. Until then, and
    for ever after a failure, `<output stem>.partial.ipynb` beside it holds what there is, and an earlier finished
    `output` stays as it was, with its marker; figures and tables that the notebook writes itself may be replaced.
    Two runs never write the same `output` at once: the second waits for the first.

    Where `output` lies outside the clone's `runs/`, the notebook's other files go with it: of the parameters `figures`
    and `results` those that it declares and `parameters` does not set become `<folder of output>/figures` and
    `<folder of output>`. That says where a run writes, not what, so it plays no part in whether a run was done.

    Args:
        path: the notebook; it is not changed.
        parameters: values for names of its cell tagged `parameters`.
        output: the executed notebook; None is `runs/<name>` in the clone, from whatever working directory.
        timeout_s: limit of the whole run, in seconds.
        cell_timeout_s: limit of each cell, in seconds.
        skip_done: leave a finished run as it is when notebook, parameters, code and data are what they were.
        progress: called with one line of text now and then.
        environment: variables set in the kernel's process; they play no part in whether a run was done.
        stop: asked about twice a second; the run ends unfinished when it says True.

    Returns:
        The finished run.

    Raises:
        ParameterError: a name is unknown, or a value has a wrong type.
        NotebookError: the run did not finish.
        ArgumentError: `path` is no notebook, `output` is no place for one, or a limit is not above 0.
        OSError: a file cannot be read or written.
    """
    path = Path(path)
    output = output_path(path, output)
    for name, limit in {"timeout_s": timeout_s, "cell_timeout_s": cell_timeout_s}.items():
        if limit is not None and not 0 < limit < math.inf:
            raise ArgumentError(name, "a finite number of seconds above 0, or None", limit)
    values, folders = _bind(path, parameters or {}, output)
    content = path.read_bytes()  # what runs is what was hashed, whatever becomes of the file meanwhile
    fingerprint = run_fingerprint(path, values, content)
    if skip_done and is_done(output, fingerprint):
        return _earlier(output)
    tell, partial = progress or (lambda line: None), output.with_suffix(PARTIAL_SUFFIX)
    with hold(partial, lambda seconds: _wait(partial, seconds, tell, stop)) as lock:
        if skip_done and is_done(output, fingerprint):  # by the run that this one waited for
            if not partial.stat().st_size:
                partial.unlink()
            return _earlier(output)
        limits = (cell_timeout_s, timeout_s)
        job = NotebookJob(path, values | folders, partial, *limits, environment or {}, stop, held=(lock,))
        return _run(job, output, content, fingerprint, tell)


def _bind(path: Path, parameters: Mapping[str, Any], output: Path) -> tuple[dict[str, Any], dict[str, str]]:
    declared = declared_parameters(read_notebook_json(path), path.name)
    if declared is None and parameters:
        names = ", ".join(parameters)
        raise ParameterError(f"{path.name} has no cell tagged {TAG!r}, so it takes no parameters (given: {names})")
    values = bind_parameters(declared or {}, parameters)
    return values, folder_parameters(declared or {}, values, output)


def _earlier(output: Path) -> NotebookRun:
    record = read_outcome(read_notebook_json(output)).record
    return NotebookRun(output, record or {}, marked_seconds(output), skipped=True)


def _wait(partial: Path, seconds: float, tell: Callable[[str], None], stop: Callable[[], bool] | None) -> None:
    if stop is not None and stop():
        raise NotebookError(f"stopped while another run wrote {partial}")
    if seconds % HEARTBEAT_S < POLL_S:
        tell(f"{partial.name}: another run writes it, waiting, {seconds:.0f} s")


def _run(
    job: NotebookJob, output: Path, content: bytes, fingerprint: str, progress: Callable[[str], None]
) -> NotebookRun:
    job.output.write_bytes(content)
    started = time.monotonic()
    record = _execute(job, output, progress)
    seconds = time.monotonic() - started
    # The marker is first: it vouches for none but the bytes that follow, and when the lock goes with its file the run
    # must count as done. (An old marker would not vouch for the new notebook: it holds the hash of the old one.)
    write_marker(output, job.output, fingerprint, seconds)
    job.output.replace(output)
    return NotebookRun(output, record, seconds, skipped=False)


def _execute(job: NotebookJob, output: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the job and return its final result record; NotebookError says what is left of it and of an earlier run."""
    problem = job.run(progress)
    where = f"what ran is in {job.output}"
    try:
        outcome = read_outcome(read_notebook_json(job.output))
    except ArgumentError:  # killed in the middle of writing it
        where = f"{job.output} is cut off"
    else:
        problem = _worse(problem, outcome.problem)
        if not problem and outcome.record is not None:
            return outcome.record
    kept = f"; {output} is still the earlier run (its figures and tables may be replaced)" if output.exists() else ""
    raise NotebookError(f"{job.notebook.name} did not finish: {problem}; {where}{kept}")


def _worse(problem: str | None, seen: str | None) -> str | None:
    """Name the cell where the notebook shows it, and what the process said where the notebook shows nothing of it."""
    if problem is None or seen is None:
        return problem or seen
    return seen if "did not complete" not in seen and "record" not in seen else f"{problem} ({seen})"
