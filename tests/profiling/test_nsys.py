"""Exports of Nsight Systems: launches with their stages, tables under other names, and what does not fit."""

import sqlite3

import pytest

from kdlab.errors import SchemaError
from kdlab.profiling import load_nsight, read_nsys, write_launches
from tests.profiling import nsys_file


def test_launches_have_the_stages_that_were_open_when_they_were_called_for(tmp_path):
    launches = read_nsys(nsys_file.write(tmp_path / "run.sqlite"))
    found = launches[["case", "repeat", "position", "mode", "stage", "phase", "kernel", "start_us", "duration_us"]]
    assert found.to_numpy().tolist() == [
        ["run.sqlite, round", 0, 0, "eager", "attention", "verify", "attend", 0.0, 3.0],
        ["run.sqlite, round", 0, 1, "eager", "o_proj", "verify", "merge", 4.0, 1.0],
        ["run.sqlite, round", 0, 2, "eager", "", "other", "Memcpy", 6.0, 0.5],
        ["run.sqlite, round", 1, 0, "graph", "", "other", "merge", 0.0, 1.0],
        ["run.sqlite, outside of rounds", 0, 0, "eager", "", "other", "merge", 0.0, 1.0],
    ]
    assert launches["layer"].tolist()[:2] == [2, 2]
    assert launches["layer"].isna().tolist()[2:] == [True] * 3
    assert launches["grid"].tolist()[:2] == ["2, 1, 1", "2, 1, 1"]
    assert launches["grid"].isna().tolist() == [False, False, True, False, False]
    assert (launches["registers"][0], launches["gpu"][0]) == (40, "NVIDIA H100")
    write_launches(launches, tmp_path / "launches.parquet")
    assert len(load_nsight(tmp_path / "launches.parquet")) == 5


def test_tables_with_a_suffix_are_the_same(tmp_path):
    plain = read_nsys(nsys_file.write(tmp_path / "a.sqlite"))
    suffixed = read_nsys(nsys_file.write(tmp_path / "b.sqlite", suffix="_V2"))
    assert suffixed["stage"].tolist() == plain["stage"].tolist()
    assert suffixed["duration_us"].tolist() == plain["duration_us"].tolist()


def test_without_ranges_there_are_times_and_no_stages_and_it_is_said(tmp_path):
    with pytest.warns(UserWarning, match="no NVTX range of the domain 'kdlab'"):
        launches = read_nsys(nsys_file.write(tmp_path / "run.sqlite", nvtx=False))
    assert launches["stage"].tolist() == [""] * 5
    assert launches["duration_us"].sum() == 6.5


def test_tables_of_an_unknown_version_are_read_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="version 4.0.0, read as those of version 3"):
        launches = read_nsys(nsys_file.write(tmp_path / "run.sqlite", version="4.0.0"))
    assert launches["stage"][0] == "attention"


def test_a_layout_that_does_not_fit_is_named(tmp_path):
    columns = '(start INT, "end" INT, deviceId INT, correlationId INT, globalPid INT, name TEXT)'
    with pytest.raises(SchemaError, match="table CUPTI_ACTIVITY_KIND_KERNEL has no column 'demangledName'"):
        read_nsys(nsys_file.write(tmp_path / "run.sqlite", kernel_columns=columns))
    with sqlite3.connect(tmp_path / "empty.sqlite") as file:
        file.execute("create table META_DATA_EXPORT (name TEXT, value TEXT)")
        file.execute("insert into META_DATA_EXPORT values ('EXPORT_SCHEMA_VERSION', '3.1.1')")
    with pytest.raises(SchemaError, match=r"no table CUPTI_ACTIVITY_KIND_KERNEL\*"):
        read_nsys(tmp_path / "empty.sqlite")
    (tmp_path / "text.sqlite").write_text("no database, but long enough for one: " + "x" * 4000)
    with pytest.raises(SchemaError, match="not a readable SQLite export"):
        read_nsys(tmp_path / "text.sqlite")
    with pytest.raises(FileNotFoundError):
        read_nsys(tmp_path / "none.sqlite")
