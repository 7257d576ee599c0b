"""Whether a notebook ran to its end: it counts only when every cell completed and the notebook said so itself."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError
from kdlab.report.notebook_file import read_notebook_json
from kdlab.report.params import INJECTED_TAG, plain_value
from kdlab.report.summary import conclusions

RESULT_MIME = "application/vnd.kdlab.result+json"
PARTIAL_SUFFIX = ".partial.ipynb"
"""Of the file that a run writes until it is whole, and for ever where it does not finish."""
# A notebook file sorts the keys of what it stores, so the order of a table's columns travels beside it.
_COLUMNS_KEY = "columns of tables"


def show_result(record: dict[str, Any]) -> None:
    """Display `record` as the result of the notebook that runs; the last one a notebook shows must hold `final: True`.

    Args:
        record: JSON-able, keys are text. Lists of dictionaries are tables, which `kdlab report` prints; `conclusion`,
            a sentence or a list of them, comes first in the report and last in what is printed; `provenance` and plain
            values go into the report's provenance section.

    Raises:
        ArgumentError: `record` is no dictionary, or its conclusion is no text.
        ParameterError: a value in it has no JSON form.
    """
    if not isinstance(record, dict):
        raise ArgumentError("record", "a dictionary", type(record).__name__)
    from IPython.display import display

    plain = _plain("record", record)
    conclusions(plain)  # refuses what no report could show
    columns = {name: list(rows[0]) for name, rows in record_tables(plain)}
    data = {RESULT_MIME: plain | {_COLUMNS_KEY: columns}, "text/plain": f"result record: {', '.join(plain)}"}
    display(data, raw=True)


def record_tables(record: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (name, rows) of every table of a result record: values that are lists of dictionaries."""
    for name, value in record.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            yield name, value


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}[{key!r}]", item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, float) and value != value:
        return None  # JSON has no NaN; a value that does not exist is null
    return plain_value(name, value)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an executed notebook holds: `problem` is None when it ran to its end; `record` is its last result record."""

    problem: str | None
    record: dict[str, Any] | None


def read_outcome(notebook: Mapping[str, Any]) -> Outcome:
    """Judge an executed notebook by its cells, never by the exit code alone.

    papermill calls a cell "completed" after a time-out and when the kernel died, and a `sys.exit(0)` raises nothing: so
    no error output, every code cell completed and a final result record are all asked for.
    """
    cells = [cell for cell in notebook["cells"] if not _is_added(cell)]
    code = [(i, cell) for i, cell in enumerate(cells, 1) if cell["cell_type"] == "code"]
    record = next(reversed(list(_records(cell for _, cell in code))), None)
    for i, cell in code:
        problem = _cell_problem(cell)
        if problem:
            return Outcome(f"cell {i}: {problem}", record)
    if notebook["metadata"].get("papermill", {}).get("exception"):
        return Outcome("stopped by an exception", record)
    if record is None:
        return Outcome("showed no result record (kdlab.report.show_result)", None)
    if record.get("final") is not True:
        return Outcome("its last result record does not say final: true", record)
    return Outcome(None, record)


def last_problem(output: Path) -> str | None:
    """Return why the last run of a notebook did not finish, None where it did.

    Args:
        output: where finished runs of it appear; a run that did not finish leaves its partial file beside it.

    Raises:
        ArgumentError: neither file is there, or `output` is no notebook.
    """
    partial = output.with_suffix(PARTIAL_SUFFIX)
    if not partial.exists():
        return read_outcome(read_notebook_json(output)).problem
    try:
        problem = read_outcome(read_notebook_json(partial)).problem
    except ArgumentError:  # killed in the middle of writing it
        problem = "its file is cut off"
    earlier = f"; {output} is an earlier run" if output.exists() else ""
    return f"{problem or 'it was ended at its last cell'}; what ran is in {partial}{earlier}"


def _is_added(cell: Mapping[str, Any]) -> bool:
    # papermill injects the parameters, and puts markdown cells at the top and before a cell that failed.
    tags = cell.get("metadata", {}).get("tags", [])
    return any(tag == INJECTED_TAG or tag.startswith("papermill-error-cell") for tag in tags)


def _records(cells: Any) -> Iterator[dict[str, Any]]:
    for cell in cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if RESULT_MIME in data:
                yield _in_order(data[RESULT_MIME])


def _in_order(stored: Mapping[str, Any]) -> dict[str, Any]:
    record = {name: value for name, value in stored.items() if name != _COLUMNS_KEY}
    for name, columns in stored.get(_COLUMNS_KEY, {}).items():
        record[name] = [{column: row[column] for column in columns if column in row} | row for row in record[name]]
    return record


def _cell_problem(cell: Mapping[str, Any]) -> str | None:
    for output in cell.get("outputs", []):
        if output["output_type"] == "error":
            message = str(output.get("evalue", "")).strip().splitlines()
            return f"{output.get('ename')}: {message[0] if message else ''}".rstrip(": ")
    if not "".join(cell["source"]).strip():
        return None
    status = cell.get("metadata", {}).get("papermill", {}).get("status")
    return None if status == "completed" else f"did not complete (status {status})"
