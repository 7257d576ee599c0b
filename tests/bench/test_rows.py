"""Result rows: summaries, the fixed schema, files, and the committed file of version 1."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kdlab.bench.rows import ROWS_FORMAT, bench_row, read_rows, rows_frame, samples_frame, summarize_samples, write_rows
from kdlab.errors import ArgumentError, SchemaError
from kdlab.provenance import COMPARED_FIELDS, run_provenance
from tests.golden.make_parquet_v1 import PROVENANCE, example_rows

GOLDEN = Path(__file__).parents[1] / "golden"


def row(**columns):
    return bench_row("op", "time_us", "us", **{"provenance": PROVENANCE, "case": {}, "value": 1.0, **columns})


def test_summary_against_numbers_by_hand():
    assert summarize_samples(range(11)) == {"n": 11, "median": 5.0, "p10": 1.0, "p90": 9.0}
    assert summarize_samples([4.0]) == {"n": 1, "median": 4.0, "p10": 4.0, "p90": 4.0}
    assert summarize_samples([2, 1]) == pytest.approx({"n": 2, "median": 1.5, "p10": 1.1, "p90": 1.9})


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_summary_refuses_nothing_and_what_is_no_number(samples):
    with pytest.raises(ArgumentError, match="samples"):
        summarize_samples(samples)


def test_a_row_takes_its_facts_from_the_provenance():
    provenance = run_provenance(streams=1, graph="eager", temperature=0.5, dtype="float32") | {"git_commit": "c" * 40}
    (got,) = rows_frame([row(provenance=provenance, value=2.0, case={"b": 1, "a": 2})]).to_dict("records")
    assert got["case"] == '{"a": 2, "b": 1}'
    assert (got["value"], got["unit"], got["n"]) == (2.0, "us", 1)
    assert (got["run_id"], got["commit"]) == (provenance["run_id"], "c" * 40)
    assert (got["graph"], got["temperature"], got["streams"]) == ("eager", 0.5, 1)
    assert json.loads(got["provenance"]) == provenance
    assert pd.isna(got["median"])
    assert pd.isna(got["drafter_sha256"])


def test_everything_that_must_agree_in_a_comparison_is_a_column():
    assert set(COMPARED_FIELDS) <= {field.name for field in ROWS_FORMAT.fields}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"colour": "red"}, "colour"),
        ({"samples": [1.0]}, "exactly one"),
        ({"value": None}, "exactly one"),
        ({"value": float("nan")}, "finite"),
        ({"value": None, "samples": []}, "at least one"),
    ],
)
def test_rows_that_say_too_much_or_too_little(columns, message):
    with pytest.raises(ArgumentError, match=message):
        row(**columns)


def test_files_give_back_the_table(tmp_path):
    rows = example_rows()
    write_rows(rows, tmp_path / "rows.parquet")
    pd.testing.assert_frame_equal(read_rows(tmp_path / "rows.parquet"), rows)
    write_rows(read_rows(tmp_path / "rows.parquet").query("op == 'round'"), tmp_path / "again.parquet")
    both = read_rows(tmp_path / "again.parquet", tmp_path / "rows.parquet")
    assert both["op"].tolist() == ["round", "round", "moe_int4"]
    assert both["samples"].iloc[1].tolist() == [2.0, 1.0, 4.0]


def test_no_rows(tmp_path):
    write_rows(rows_frame([]), tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet").empty


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.drop(columns="unit"), "no column 'unit'"),
        (lambda rows: rows.assign(colour="red"), r"unknown columns \['colour'\]"),
        (lambda rows: rows.assign(value=np.nan), "'value' holds 2 nulls"),
        (lambda rows: rows.assign(n="many"), "'n': expected int32"),
        (lambda rows: rows.assign(rows=0.5), "'rows': expected int32"),
    ],
)
def test_tables_that_break_the_schema_are_not_written(tmp_path, change, message):
    with pytest.raises(SchemaError, match=message):
        write_rows(change(example_rows()), tmp_path / "rows.parquet")
    assert list(tmp_path.iterdir()) == []


def test_version_1_file_stays_readable():
    rows = read_rows(GOLDEN / "bench-rows-v1.parquet")
    pd.testing.assert_frame_equal(rows, example_rows())
    timed, bare = rows.to_dict("records")
    assert (timed["value"], timed["median"], timed["n"], timed["unit"]) == (2.0, 2.0, 3, "ms")
    assert (timed["p10"], timed["p90"]) == pytest.approx((1.2, 3.6))
    assert (timed["method"], timed["setting"], timed["rows"], timed["context"]) == ("ddtree", 32.0, 33, 100)
    assert (timed["sm_clock_mhz_before"], timed["gpu_temperature_c_after"]) == (1980.0, 43.5)
    assert (timed["graph"], timed["drafter_sha256"], timed["dirty"]) == ("eager", "d" * 64, False)
    assert (bare["op"], bare["value"], bare["n"], bare["simulated"]) == ("moe_int4", 3.5, 1, True)
    assert json.loads(bare["provenance"]) == PROVENANCE


def test_samples_come_back_one_a_row_with_their_prompt():
    long = samples_frame(example_rows())
    assert long["prompt"].tolist() == [0, 0, 1]
    assert long["value"].tolist() == [2.0, 1.0, 4.0]
    assert set(long["setting"]) == {32.0}
    assert samples_frame(rows_frame([row()])).empty
