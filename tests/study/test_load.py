"""The table of a grid: tidy rows, names that collide, points without results, and files that are none."""

import json
import math

import pyarrow as pa
import pytest

from kdlab import study
from kdlab.errors import ArgumentError, SchemaError
from kdlab.parquet import TableFormat, write_table
from kdlab.study.grid_table import GRID_FORMAT

FORMAT_1 = ["point", "status", "parameters", "record", "seconds", "problem", "traceback", "notebook"]


def write(path, *points, kind=GRID_FORMAT):
    rows = [dict.fromkeys(FORMAT_1) | point for point in points]
    for row in rows:
        row["parameters"] = json.dumps(row["parameters"])
        row["record"] = None if row["record"] is None else json.dumps(row["record"])
    columns = {field.name: pa.array([row[field.name] for row in rows], field.type) for field in kind.fields}
    write_table(path, columns, kind)
    return path


def test_a_row_a_point_with_parameters_first_and_dictionaries_flat(tmp_path, monkeypatch):
    record = {"final": True, "tau": 2.5, "budget": 99, "status": "x", "best": {"at": {"rows": 8}}, "loops": ["code"],
              "sweep": [{"rows": 1}]}  # fmt: skip
    done = {"point": "a", "status": "done", "parameters": {"budget": 7, "seconds": 1}, "record": record, "seconds": 3.0}
    failed = {"point": "b", "status": "failed", "parameters": {"budget": 15, "seconds": 1}, "problem": "no such tree"}
    monkeypatch.setattr("kdlab.paths.GRIDS", tmp_path)
    path = write(tmp_path / "night1" / "results.parquet", done, failed)
    table = study.load("night1")
    assert table.loc[0].to_dict() | {"problem": None} == {
        "budget": 7, "seconds": 1, "point": "a", "status": "done", "grid.seconds": 3.0, "problem": None,
        "tau": 2.5, "record.budget": 99, "record.status": "x", "best.at.rows": 8, "loops": ["code"],
    }  # fmt: skip
    assert table.loc[1, ["budget", "status", "problem"]].tolist() == [15, "failed", "no such tree"]
    assert math.isnan(table.loc[1, "tau"])
    assert study.load(path).equals(table)
    assert study.load("night1", folder=tmp_path).equals(table)


def test_a_table_of_the_records_has_a_row_for_each_of_its_rows(tmp_path):
    rows = [{"rows": 1, "budget": 0}, {"rows": 8, "budget": 7}]
    points = [
        {"point": str(n), "status": "done", "parameters": {"seed": n, "rows": "r"}, "record": {"sweep": rows[: n + 1]}}
        for n in range(2)
    ]
    path = write(tmp_path / "x.parquet", *points, {"point": "f", "status": "failed", "parameters": {"seed": 9}})
    table = study.load(path, "sweep")
    assert list(table.columns) == ["seed", "rows", "point", "record.rows", "budget"]
    assert table[["seed", "record.rows", "budget"]].values.tolist() == [[0, 1, 0], [1, 1, 0], [1, 8, 7]]
    with pytest.raises(ArgumentError, match=r"tables \(sweep\), got 'swep'"):
        study.load(path, "swep")


def test_what_is_no_grid_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"night9/results\.parquet"):
        study.load("night9", folder=tmp_path)
    for name in ("../x", "", "a/b", ".hidden"):
        with pytest.raises(ArgumentError, match="name: expected letters"):
            study.load(name, folder=tmp_path)
    write_table(tmp_path / "other.parquet", {"a": pa.array([1])}, TableFormat("other", 1, (pa.field("a", pa.int64()),)))
    with pytest.raises(SchemaError, match="expected a table of kind 'grid'"):
        study.load(tmp_path / "other.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(SchemaError, match="not a readable Parquet file"):
        study.load(tmp_path / "broken.parquet")


def test_the_first_version_of_the_file_stays_as_it_is():
    assert (GRID_FORMAT.version, [field.name for field in GRID_FORMAT.fields]) == (1, FORMAT_1)
