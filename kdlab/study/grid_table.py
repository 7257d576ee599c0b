"""The results of a grid of notebook runs: one Parquet file a grid, read as one tidy table."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kdlab.column_rules import json_object
from kdlab.errors import ArgumentError
from kdlab.parquet import TableFormat, read_table
from kdlab.paths import GRID_RESULTS, grid_folder

if TYPE_CHECKING:
    import pandas as pd

GRID_FORMAT = TableFormat(
    "grid",
    1,
    (
        pa.field("point", pa.string(), nullable=False),  # the folder of its files, below the grid's own
        pa.field("status", pa.string(), nullable=False),  # done, failed, stopped or waiting
        pa.field("parameters", pa.string(), nullable=False),  # JSON: what was given, in the notebook's order
        pa.field("record", pa.string()),  # JSON: the last result record of a point that is done
        pa.field("seconds", pa.float64()),
        pa.field("problem", pa.string()),
        pa.field("traceback", pa.string()),
        pa.field("notebook", pa.string()),  # executed or partial, seen from the grid's folder
    ),
    (json_object("parameters"), json_object("record")),
)


def load(name: str | os.PathLike[str], table: str | None = None, folder: str | Path | None = None) -> "pd.DataFrame":
    """Read the results of a grid: one row a point, or one row of a table of its record.

    Columns are the parameters that were given, then `point`, `status`, `seconds` and `problem`, then the values of the
    result record: dictionaries in it become columns with a dot (`best.budget`), its tables (lists of dictionaries) are
    left to `table`. A name that is taken already gets `grid.` or `record.` before it. What a point lacks is NaN.

    Args:
        name: of the grid, or a path that ends in .parquet.
        table: a table of the result records; the frame then has a row for each of its rows, points that are not done
            have none.
        folder: where the grid's folder lies; None is the clone's `runs/grids`.

    Returns:
        The rows in the order of the points.

    Raises:
        FileNotFoundError: there is no such grid, or it has no results yet.
        SchemaError: the file is no table of a grid.
        ArgumentError: `name` is no name, or no record has such a table.
    """
    import pandas as pd

    is_file = str(name).endswith(".parquet")
    path = Path(name) if is_file else grid_folder(str(name), folder) / GRID_RESULTS
    points = read_table(path, GRID_FORMAT)[0].to_pylist()
    if table is None:
        return pd.DataFrame([_point_row(point) for point in points])
    rows = [_table_row(point, row) for point in points for row in _tables(point).get(table, [])]
    if not rows:
        known = dict.fromkeys(name for point in points for name in _tables(point))
        expected = f"one of the records' tables ({', '.join(known) or 'there are none'})"
        raise ArgumentError("table", expected, repr(table))
    return pd.DataFrame(rows)


def _parameters(point: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads(point["parameters"]))


def _record(point: Mapping[str, Any]) -> dict[str, Any]:
    return {} if point["record"] is None else json.loads(point["record"])


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _tables(point: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {name: value for name, value in _record(point).items() if _is_table(value)}


def _point_row(point: Mapping[str, Any]) -> dict[str, Any]:
    row = _parameters(point)
    _join(row, {name: point[name] for name in ("point", "status", "seconds", "problem")}, "grid")
    values = {name: value for name, value in _record(point).items() if name != "final" and not _is_table(value)}
    return _join(row, _flat(values), "record")


def _table_row(point: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return _join(_join(_parameters(point), {"point": point["point"]}, "grid"), _flat(values), "record")


def _join(row: dict[str, Any], values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    row |= {name if name not in row else f"{prefix}.{name}": value for name, value in values.items()}
    return row


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found
