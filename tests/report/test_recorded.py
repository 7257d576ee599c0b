"""Recorded files in one document: listed with what they are from, refused where they differ."""

import pytest

from kdlab import save_field
from kdlab.bench.rows import bench_row, rows_frame, write_rows
from kdlab.errors import ArgumentError, ComparisonError, SchemaError
from kdlab.report import check_one_document, recorded_files
from kdlab.study.compare import ACCEPTANCE_FIELDS
from tests.golden.make_parquet_v1 import PROVENANCE
from tests.study.fields import draft_field


def save_rows(path, *facts):
    rows = [bench_row("copy", "time_us", "us", provenance=PROVENANCE | own, case={}, value=1.0) for own in facts]
    write_rows(rows_frame(rows), path)
    return path


def test_files_of_one_card_and_one_pair_are_listed(tmp_path):
    gpu = [save_rows(tmp_path / f"{name}.parquet", {"gpu": "H200", "gpu_uuid": "1"}) for name in "ab"]
    files = check_one_document(gpu, [save_rows(tmp_path / "times.parquet", {"gpu": None})])
    assert files["file"].tolist() == ["a.parquet", "b.parquet", "times.parquet"]
    assert files["gpu"].dropna().tolist() == ["H200", "H200"]
    assert check_one_document([], []).empty


@pytest.mark.parametrize(("field", "value"), [("gpu", "H100"), ("gpu_uuid", "2")])
def test_rows_of_two_cards_are_refused(tmp_path, field, value):
    facts = {"gpu": "H200", "gpu_uuid": "1"}
    gpu = [save_rows(tmp_path / "a.parquet", facts), save_rows(tmp_path / "b.parquet", facts | {field: value})]
    with pytest.raises(ComparisonError, match=f"{field}: results with"):
        check_one_document(gpu, [])
    with pytest.raises(ComparisonError, match=f"{field}: results with"):
        check_one_document([save_rows(tmp_path / "c.parquet", facts, facts | {field: value})], [])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("drafter_sha256", "x"), ("prompt_set_digest", "x"), ("template_hash", "x"), ("thinking", True),
        ("temperature", 1.0),
    ],
)  # fmt: skip
def test_acceptance_and_times_of_other_runs_are_refused(tmp_path, field, value):
    field_file = tmp_path / "field.parquet"
    recorded = draft_field()
    save_field(recorded, field_file)
    same = {name: recorded.provenance.get(name) for name in ACCEPTANCE_FIELDS}
    times = save_rows(tmp_path / "times.parquet", same)
    assert len(check_one_document([], [field_file, times])) == 2
    times = save_rows(tmp_path / "times.parquet", same | {field: value})
    with pytest.raises(ComparisonError, match=f"{field}: results with"):
        check_one_document([], [field_file, times])


def test_other_tables_are_passed_over_and_damaged_ones_named(tmp_path):
    rows = save_rows(tmp_path / "rows.parquet", {})
    (tmp_path / "notes.md").write_text("text")
    assert recorded_files(tmp_path) == [rows]
    assert recorded_files(tmp_path / "absent") == []
    write_rows(rows_frame([]), tmp_path / "empty.parquet")
    with pytest.raises(ArgumentError, match="at least one row"):
        check_one_document([tmp_path / "empty.parquet"], [])
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(SchemaError, match=r"broken\.parquet"):
        recorded_files(tmp_path)
