"""Run one notebook with parameters: in a process group of its own, whole or not at all."""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError, NotebookError, ParameterError
from kdlab.report.done_marker import is_done, marked_seconds, marker_path, run_fingerprint, write_marker
from kdlab.report.notebook_file import read_notebook_json
from kdlab.report.notebook_job import NotebookJob
from kdlab.report.outcome import read_outcome
from kdlab.report.params import TAG, bind_parameters, declared_parameters


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
) -> NotebookRun:
    """Execute the notebook at `path` and write it, with its outputs, to `output`.

    The kernel is this interpreter, started in the notebook's folder as JupyterLab does. `output` appears only when
    the run is complete: no error, every code cell completed, a last result record with `final: True`. Until then, and
    for ever after a failure, `<output stem>.partial.ipynb` beside it holds what there is.

    Args:
        path: the notebook; it is not changed.
        parameters: values for names of its cell tagged `parameters`.
        output: the executed notebook, `runs/<name>` in the working directory when None; an old one is deleted at start.
        timeout_s: limit of the whole run, in seconds.
        cell_timeout_s: limit of each cell, in seconds.
        skip_done: leave a finished run as it is when notebook, parameters, code and data are what they were.
        progress: called with one line of text now and then.

    Returns:
        The finished run.

    Raises:
        ParameterError: a name is unknown, or a value has a wrong type.
        NotebookError: the run did not finish.
        ArgumentError: `path` is no notebook, `output` is no place for one, or a limit is not above 0.
        OSError: a file cannot be read or written.
    """
    path = Path(path)
    output = Path("runs") / path.name if output is None else Path(output)
    if output.suffix != ".ipynb" or output.resolve() == path.resolve():
        raise ArgumentError("output", "another .ipynb file than the notebook itself", str(output))
    for name, limit in {"timeout_s": timeout_s, "cell_timeout_s": cell_timeout_s}.items():
        if limit is not None and not limit > 0:
            raise ArgumentError(name, "a number of seconds above 0, or None", limit)
    values = _bind(path, parameters or {})
    fingerprint = run_fingerprint(path, values)
    if skip_done and is_done(output, fingerprint):
        record = read_outcome(read_notebook_json(output)).record
        return NotebookRun(output, record or {}, marked_seconds(output), skipped=True)
    return _run(path, values, output, fingerprint, timeout_s, cell_timeout_s, progress or (lambda line: None))


def _bind(path: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    declared = declared_parameters(read_notebook_json(path), path.name)
    if declared is None and parameters:
        names = ", ".join(parameters)
        raise ParameterError(f"{path.name} has no cell tagged {TAG!r}, so it takes no parameters (given: {names})")
    return bind_parameters(declared or {}, parameters)


def _run(
    path: Path,
    values: dict[str, Any],
    output: Path,
    fingerprint: str,
    timeout_s: float | None,
    cell_timeout_s: float | None,
    progress: Callable[[str], None],
) -> NotebookRun:
    partial = output.with_suffix(".partial.ipynb")
    output.parent.mkdir(parents=True, exist_ok=True)
    for old in (marker_path(output), output):
        old.unlink(missing_ok=True)
    shutil.copyfile(path, partial)
    started = time.monotonic()
    job = NotebookJob(path, values, partial, cell_timeout_s, timeout_s)
    problem = job.run(progress)
    outcome = read_outcome(_read_partial(path, partial, problem))
    problem = _worse(problem, outcome.problem)
    if problem or outcome.record is None:
        raise NotebookError(f"{path.name} did not finish: {problem}; what ran is in {partial}")
    seconds = time.monotonic() - started
    partial.replace(output)
    write_marker(output, fingerprint, seconds)
    return NotebookRun(output, outcome.record, seconds, skipped=False)


def _read_partial(path: Path, partial: Path, problem: str | None) -> Any:
    try:
        return read_notebook_json(partial)
    except ArgumentError as error:  # killed in the middle of writing it
        raise NotebookError(f"{path.name} did not finish: {problem}; {partial} is cut off") from error


def _worse(problem: str | None, seen: str | None) -> str | None:
    """Name the cell where the notebook shows it, and what the process said where the notebook shows nothing of it."""
    if problem is None or seen is None:
        return problem or seen
    return seen if "did not complete" not in seen and "record" not in seen else f"{problem} ({seen})"
