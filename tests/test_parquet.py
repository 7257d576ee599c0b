"""Versioned tables: whole or nothing, older files readable, newer and foreign ones refused."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kdlab import parquet
from kdlab.errors import SchemaError
from kdlab.parquet import TableFormat, read_table, table_kind, write_table

V1 = TableFormat("points", 1, (pa.field("budget", pa.int32(), nullable=False), pa.field("name", pa.string())))
V2 = TableFormat(
    "points",
    2,
    (
        pa.field("budget", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("sm_clock_mhz", pa.float64()),
    ),
)
COLUMNS = {"budget": pa.array([1, 2], pa.int32()), "name": pa.array(["a", None])}


def test_round_trip_keeps_rows_metadata_and_version(tmp_path):
    path = tmp_path / "new" / "points.parquet"
    write_table(path, COLUMNS, V1, {"run": "r"})
    table, metadata = read_table(path, V1)
    assert table.to_pydict() == {"schema_version": [1, 1], "budget": [1, 2], "name": ["a", None]}
    assert metadata == {"run": "r"}
    assert [file.name for file in path.parent.iterdir()] == ["points.parquet"]


def test_an_older_file_is_widened_and_filled(tmp_path):
    write_table(tmp_path / "p", COLUMNS, V1)
    table, _ = read_table(tmp_path / "p", V2)
    assert table.schema.equals(V2.schema)
    assert table["sm_clock_mhz"].to_pylist() == [None, None]
    assert table["budget"].to_pylist() == [1, 2]
    assert table["schema_version"].to_pylist() == [1, 1]


def test_a_newer_file_is_refused_by_its_version(tmp_path):
    write_table(tmp_path / "p", {**COLUMNS, "sm_clock_mhz": pa.array([1.0, 2.0])}, V2)
    with pytest.raises(SchemaError, match="schema version 2 of 'points' is newer than 1"):
        read_table(tmp_path / "p", V1)


def test_another_kind_is_refused(tmp_path):
    write_table(tmp_path / "p", COLUMNS, V1)
    with pytest.raises(SchemaError, match="kind 'lines', got 'points'"):
        read_table(tmp_path / "p", TableFormat("lines", 1, V1.fields))


def test_a_column_that_is_there_twice_is_named(tmp_path):
    write_table(tmp_path / "p", COLUMNS, V1)
    table = pq.read_table(tmp_path / "p")
    pq.write_table(table.append_column("name", table["name"]), tmp_path / "p")
    with pytest.raises(SchemaError, match=r"p: columns \['name'\] are there more than once"):
        read_table(tmp_path / "p", V1)


def test_foreign_broken_and_absent_files(tmp_path):
    pq.write_table(pa.table(COLUMNS), tmp_path / "foreign")
    with pytest.raises(SchemaError, match="not a kdlab table"):
        read_table(tmp_path / "foreign", V1)
    write_table(tmp_path / "cut", COLUMNS, V1)
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-20])
    with pytest.raises(SchemaError, match="not a readable Parquet file"):
        read_table(tmp_path / "cut", V1)
    with pytest.raises(FileNotFoundError, match="absent"):
        read_table(tmp_path / "absent", V1)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"name": COLUMNS["name"]}, r"missing columns \['budget'\]"),
        ({"budget": COLUMNS["budget"]}, r"missing columns \['name'\]"),
        ({**COLUMNS, "extra": pa.array([1, 2])}, r"unknown columns \['extra'\]"),
        ({**COLUMNS, "budget": pa.array([1, None], pa.int32())}, "'budget' holds 1 nulls"),
        ({**COLUMNS, "budget": pa.array([1, 2**40])}, "'budget': expected int32, got int64"),
        ({**COLUMNS, "budget": pa.array(["x", "y"])}, "'budget': expected int32, got string"),
    ],
)
def test_what_breaks_the_format_is_not_written(tmp_path, columns, message):
    with pytest.raises(SchemaError, match=message):
        write_table(tmp_path / "p", columns, V1)
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_that_lacks_a_required_column_is_refused(tmp_path):
    write_table(tmp_path / "p", {"name": COLUMNS["name"]}, TableFormat("points", 1, V1.fields[1:]))
    with pytest.raises(SchemaError, match=r"missing columns \['budget'\]"):
        read_table(tmp_path / "p", V1)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_table(tmp_path / "p", COLUMNS, V1)
    before = (tmp_path / "p").read_bytes()

    def fail_half_way(_, file, **__):
        file.write(b"PAR1 half a file")
        raise OSError("disk full")

    monkeypatch.setattr(parquet.pq, "write_table", fail_half_way)
    with pytest.raises(OSError, match="disk full"):
        write_table(tmp_path / "p", {"budget": pa.array([9], pa.int32()), "name": pa.array(["z"])}, V1)
    assert (tmp_path / "p").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["p"]


def test_the_kind_is_read_alone(tmp_path):
    write_table(tmp_path / "p", COLUMNS, V1)
    assert table_kind(tmp_path / "p") == "points"
    pq.write_table(pa.table(COLUMNS), tmp_path / "foreign")
    assert table_kind(tmp_path / "foreign") is None
    pq.write_table(pa.table(COLUMNS).replace_schema_metadata({b"kdlab_kind": b"\xff"}), tmp_path / "hostile")
    with pytest.raises(SchemaError, match="hostile: not a readable Parquet file"):
        table_kind(tmp_path / "hostile")


def test_no_rows(tmp_path):
    write_table(tmp_path / "p", {"budget": pa.array([], pa.int32()), "name": pa.array([], pa.string())}, V1)
    assert read_table(tmp_path / "p", V2)[0].num_rows == 0
