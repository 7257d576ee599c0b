"""The table of kernel launches: its columns and types, files that come back as they were, and what is refused."""

import re
from pathlib import Path

import pandas as pd
import pytest

import kdlab
from kdlab.bench import write_rows
from kdlab.errors import SchemaError
from kdlab.profiling import LAUNCHES_FORMAT, PHASES, launches_frame, load_nsight, phase_of, write_launches
from tests.bench.samples import kernel_rows
from tests.profiling.samples import PROVENANCE, launch, launches


def test_a_file_comes_back_as_it_was(tmp_path):
    frame = launches(start_us=2.5)
    write_launches(frame, tmp_path / "launches.parquet")
    pd.testing.assert_frame_equal(load_nsight(tmp_path / "launches.parquet"), frame)
    assert list(frame.columns[1:]) == [field.name for field in LAUNCHES_FORMAT.fields]


def test_what_is_not_known_is_empty_and_whole_numbers_stay_whole():
    frame = launches_frame([launch(0, "attention"), launch(1, "", layer=3, rows=None)], PROVENANCE)
    assert frame["rows"].dtype == frame["layer"].dtype == frame["registers"].dtype == pd.Int64Dtype()
    assert frame["position"].dtype == "int32"
    assert frame["start_us"].dtype == frame["tensor_pct"].dtype == "float64"
    assert frame["layer"].isna().tolist() == [True, False]
    assert frame["start_us"].isna().all()
    assert frame["phase"].tolist() == ["verify", "other"]
    assert frame["commit"].tolist() == ["abc", "abc"]


def test_every_stage_that_the_code_marks_has_a_phase():
    files = Path(kdlab.__file__).parent.rglob("*.py")
    marked = {name for path in files for name in re.findall(r"with stage\(\"([^\"]+)\"\)", path.read_text())}
    assert len(marked) > 15
    assert [name for name in sorted(marked) if phase_of(name) not in PHASES[:-1]] == []
    assert phase_of("lunch") == "other"


@pytest.mark.parametrize(
    ("columns", "message"),
    [({"kernel": None}, "'kernel'"), ({"rows": "many"}, "'rows'"), ({"lunch": 1}, "lunch")],
)
def test_a_row_that_breaks_the_table_is_refused(columns, message):
    with pytest.raises(SchemaError, match=message):
        launches_frame([launch(0, "attention", **columns)], PROVENANCE)


def test_files_of_other_kinds_and_of_two_machines_are_refused(tmp_path):
    path = tmp_path / "launches.parquet"
    with pytest.raises(FileNotFoundError):
        load_nsight(path)
    write_rows(kernel_rows(), path)
    with pytest.raises(SchemaError, match="bench_rows"):
        load_nsight(path)
    other = launches_frame([launch(0, "attention")], PROVENANCE | {"gpu": "NVIDIA H100"})
    write_launches(pd.concat([launches(), other], ignore_index=True), path)
    with pytest.raises(SchemaError, match="one machine, got NVIDIA H100, NVIDIA H200"):
        load_nsight(path)
    write_launches(launches(mode="fast"), path)
    with pytest.raises(SchemaError, match="'mode'"):
        load_nsight(path)
    with pytest.raises(SchemaError, match="no column 'stage'"):
        write_launches(launches().drop(columns="stage"), path)
