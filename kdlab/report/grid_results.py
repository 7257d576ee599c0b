"""The results of a grid's points, collected into the one Parquet file that `kdlab.study.load` reads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from kdlab.parquet import write_table
from kdlab.paths import GRID_RESULTS
from kdlab.report.grid_task import PointEnd, PointTask
from kdlab.report.notebook_file import read_notebook_json
from kdlab.report.outcome import PARTIAL_SUFFIX, read_outcome
from kdlab.source import code_facts
from kdlab.study.grid_table import GRID_FORMAT


def save_results(name: str, root: Path, tasks: Sequence[PointTask], ends: Mapping[str, PointEnd]) -> None:
    """Write the table of a grid as it is now: points without an end are waiting.

    Raises:
        OSError: the file cannot be written.
    """
    rows = [_row(root, task, ends.get(task.name, PointEnd(task.name, "waiting"))) for task in tasks]
    columns = {field.name: pa.array([row[field.name] for row in rows], field.type) for field in GRID_FORMAT.fields}
    facts = {"name": name, "notebook": tasks[0].notebook, "code": json.dumps(code_facts())}
    try:
        write_table(root / GRID_RESULTS, columns, GRID_FORMAT, facts)
    except OSError as error:
        reason = f"{error.strerror or error}; what is done is kept, and the same grid again collects it"
        raise OSError(error.errno, reason, str(root / GRID_RESULTS)) from error


def _row(root: Path, task: PointTask, end: PointEnd) -> dict[str, Any]:
    done = end.status == "done"
    notebook = task.output if done else task.output.with_suffix(PARTIAL_SUFFIX)
    record = read_outcome(read_notebook_json(notebook)).record if done else None
    return {
        "point": task.name,
        "status": end.status,
        "parameters": json.dumps(task.parameters),
        "record": None if record is None else json.dumps(record),
        "seconds": end.seconds,
        "problem": end.problem,
        "traceback": end.traceback,
        "notebook": notebook.relative_to(root).as_posix() if notebook.exists() else None,
    }
