"""Recorded files with hostile values: refused with the file, the column, the row and what was expected."""

import functools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kdlab.bench import read_rows, write_rows
from kdlab.bench.collectives import collective_table
from kdlab.bench.full_width.table import point_table
from kdlab.bench.kernels import compare_runs
from kdlab.bench.row_rules import ROW_RULES
from kdlab.cli import main
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError, SchemaError
from kdlab.paths import DATA, K26_SHAPES
from kdlab.profiling import load_nsight
from kdlab.study import grid_table
from kdlab.study.collectives import MODELLED, fit_all_reduce, with_waits
from kdlab.study.sweep_file import load_sweeps
from tests.bench.samples import made_up_rows

NAN, INF = float("nan"), float("inf")
ROUNDS, REDUCES, KERNELS = (f"{name}-h200.parquet" for name in ("rounds", "all-reduce", "kernels"))
LAUNCHES, SWEEPS = "nsight-h200.parquet", "mini-acceptance.parquet"
READERS = {LAUNCHES: load_nsight, SWEEPS: load_sweeps, "grid": grid_table.load}
GRID = {
    "point": "a", "status": "done", "parameters": '{"budget": 7}', "record": "{}", "seconds": 1.0, "problem": None,
    "traceback": None, "notebook": None,
}  # fmt: skip
NO_JSON = ("", "{", "[]", "null", "[" * 5000)


@functools.cache
def table_of(name):
    if name == "grid":
        columns = {field.name: pa.array([GRID[field.name]], field.type) for field in grid_table.GRID_FORMAT.fields}
        versions = pa.array([1], pa.int32())
        marks = {"kdlab_kind": "grid", "kdlab_schema_version": "1"}
        return pa.table({"schema_version": versions, **columns}).replace_schema_metadata(marks)
    path = DATA / "recorded" / name
    return pq.read_table(path).slice(0, 12).replace_schema_metadata(pq.read_schema(path).metadata)


def save(table, path):
    pq.write_table(table, path)
    return str(path)


def with_value(table, column, row, value):
    """Return the table with one other value; of a case or provenance, a pair (word, value) changes that word alone."""
    index = table.schema.get_field_index(column)
    values = table[column].to_pylist()
    if isinstance(value, tuple):
        word, new = value
        value = json.dumps(
            {name: one for name, one in (json.loads(values[row]) | {word: new}).items() if one != "gone"}
        )
    values[row] = value
    field = table.schema.field(index).with_nullable(True)
    return table.set_column(index, field, pa.array(values, field.type))


@pytest.mark.parametrize(
    ("name", "column", "values", "expected"),
    [
        (KERNELS, "value", (NAN, INF), "a finite number"),
        (KERNELS, "value", (0.0, -1.0, 1e308), "a time or rate above 0"),
        (KERNELS, "median", (0.0,), "a time or rate above 0"),
        (KERNELS, "median", (NAN,), "a finite number"),
        (KERNELS, "median", (None,), "a number beside samples"),
        (KERNELS, "p90", (INF,), "a finite number"),
        (KERNELS, "samples", ([], [NAN], [None]), "at least one finite number"),
        (KERNELS, "case", NO_JSON, "a JSON object"),
        (KERNELS, "case", (("rows", [1]), ("rows", NAN), ("rows", None)), "numbers, texts and truth values"),
        (KERNELS, "case", (("of", "gone"),), "'of' in it, a text"),
        (KERNELS, "provenance", NO_JSON, "a JSON object"),
        (ROUNDS, "case", (("rows", 0), ("rows", "gone"), ("rows", "x"), ("rows", 2**40)), "'rows' in it, a count"),
        (ROUNDS, "case", (("context", -1), ("context", "x"), ("context", "gone")), "'context' in it, a count"),
        (ROUNDS, "case", (("gpus", 0), ("gpus", "x")), "'gpus' in it, a count of at least 1 where it is given"),
        (ROUNDS, "case", (("experts", "x"),), "'experts' in it, 'tp' or 'ep'"),
        (ROUNDS, "case", (("stage", 3), ("stage", "gone")), "'stage' in it, a text"),
        (ROUNDS, "case", (("g", -0.5), ("g", 2), ("g", True)), "'g' in it, a number from 0 to 1"),
        (REDUCES, "case", (("dtype", "int8"),), "'dtype' in it"),
        (REDUCES, "case", (("width", 0),), "'width' in it"),
        (REDUCES, "case", (("bytes", 0), ("bytes", "gone")), "'bytes' in it"),
        (REDUCES, "case", (("what", 3), ("what", "gone")), "'what' in it"),
        (REDUCES, "sample_prompts", ([0],), "a prompt for each sample"),
        (LAUNCHES, "duration_us", (0.0, NAN, -1.0), "a finite number above 0"),
        (LAUNCHES, "dram_read", (NAN, -1.0), "a finite number of at least 0"),
        (LAUNCHES, "layer", (-1,), "a finite number of at least 0"),
        (
            LAUNCHES,
            "provenance",
            (*NO_JSON, ("floors", [1]), ("floors", {"x": {"y": [1]}}), ("floors", {"x": {"y": ["1", 1, 1]}})),
            "JSON object|floors of",
        ),
        (SWEEPS, "round_lengths", ([], [0] * 7, None), "a count of at least 1 for each round|nulls, expected none"),
        (SWEEPS, "setting", (NAN, -1.0), "a finite number of at least 0"),
        (SWEEPS, "provenance", NO_JSON, "a JSON object"),
        ("grid", "parameters", NO_JSON, "a JSON object"),
        ("grid", "record", NO_JSON, "a JSON object"),
    ],
)
def test_a_hostile_value_is_named_with_its_place(tmp_path, name, column, values, expected):
    table, read = table_of(name), READERS.get(name, read_rows)
    row = next(i for i, value in enumerate(table[column].to_pylist()) if name == "grid" or i > 0 or value is None)
    if name == KERNELS and column in ("value", "median", "p90", "samples"):
        row = table["unit"].to_pylist().index("us")
    if column == "case" and isinstance(values[0], tuple):  # a row whose case has the word
        row = next(i for i, case in enumerate(table["case"].to_pylist()) if values[0][0] in json.loads(case))
    read(save(table, tmp_path / "whole.parquet"))
    for value in values:
        path = save(with_value(table, column, row, value), tmp_path / "hostile.parquet")
        with pytest.raises(SchemaError, match=expected) as found:
            read(path)
        place = f"column {column!r}" if value is None and name == SWEEPS else f"column {column!r}, row {row}"
        assert str(found.value).startswith(f"{path}: {place}")


@pytest.mark.parametrize("word", ["stage", "part"])
def test_a_part_says_its_name_and_whose_it_is(tmp_path, word):
    rows = made_up_rows({9: 100.0})
    at = rows.index[rows["metric"] == "part"][0]
    case = json.loads(rows.loc[at, "case"])
    del case[word]
    rows.loc[at, "case"] = json.dumps(case)
    write_rows(rows, tmp_path / "hostile.parquet")
    with pytest.raises(SchemaError, match=f"column 'case', row {at}: expected '{word}' in it, a text"):
        read_rows(tmp_path / "hostile.parquet")


def test_a_round_of_no_tokens_is_refused(tmp_path):
    _, *others = table_of(SWEEPS)["round_lengths"].to_pylist()[0]
    path = save(with_value(table_of(SWEEPS), "round_lengths", 0, [0, *others]), tmp_path / "hostile.parquet")
    with pytest.raises(SchemaError, match="column 'round_lengths', row 0: expected a count of at least 1 for each"):
        load_sweeps(path)


def test_no_collectives_are_no_table():
    with pytest.raises(ArgumentError, match="rows of `kdlab bench collectives`, got none"):
        collective_table(read_rows(DATA / "recorded" / REDUCES).iloc[:0])


def test_an_all_reduce_that_took_no_time_is_refused_by_the_fit(tmp_path):
    row = table_of(REDUCES)["metric"].to_pylist().index("all_reduce")
    rows = read_rows(save(with_value(table_of(REDUCES), "value", row, 0.0), tmp_path / "hostile.parquet"))
    with pytest.raises(ArgumentError, match=r"times of all-reduces above 0, got 0\.0 of"):
        fit_all_reduce(rows)


def test_every_rule_of_result_rows_names_a_column():
    assert {rule.columns[0] for rule in ROW_RULES} <= set(table_of(KERNELS).column_names)


@pytest.mark.parametrize("name", [ROUNDS, REDUCES, KERNELS, LAUNCHES, SWEEPS])
def test_a_file_of_this_version_has_every_column_of_it(tmp_path, name):
    table, read = table_of(name), READERS.get(name, read_rows)
    for column in table.column_names[::7]:
        path = save(table.drop_columns([column]), tmp_path / "hostile.parquet")
        with pytest.raises(SchemaError, match=rf"{path}: .*missing columns \['{column}'\]"):
            read(path)


@pytest.mark.parametrize("content", [b"", b"no parquet " * 9, b"PAR1"])
def test_what_is_no_parquet_is_named(tmp_path, content, capsys):
    path = tmp_path / "hostile.parquet"
    path.write_bytes(content)
    for words in (["round", "--read", str(path)], ["compare", str(path), str(path)]):
        assert main(["bench", *words]) == 2
        assert f"{path}: not a readable Parquet file" in capsys.readouterr().err


def test_empty_tables_and_rows_of_other_things_are_refused_in_a_line(tmp_path, capsys):
    empty = save(table_of(ROUNDS).slice(0, 0), tmp_path / "empty.parquet")
    mini = str(DATA / "recorded" / "rounds-mini-h200.parquet")
    for path in (empty, mini):
        assert main(["bench", "round", "--read", path]) == 2
        assert main(["bench", "compare", path, path]) == 2
    assert all(line.startswith("kdlab: ") for line in capsys.readouterr().err.splitlines())


def test_a_measurement_that_is_there_twice_is_refused():
    rounds, kernels = (read_rows(*[DATA / "recorded" / name] * 2) for name in (ROUNDS, KERNELS))
    with pytest.raises(ArgumentError, match=r"each time once, got .* twice"):
        point_table(rounds)
    with pytest.raises(ArgumentError, match="each arm once"):
        compare_runs(kernels, kernels)
    pair = TargetConfig.load(K26_SHAPES / "target"), DrafterConfig.load(K26_SHAPES / "drafter")
    with pytest.raises(ArgumentError, match=r"rows: expected each round once, got .* twice"):
        with_waits(MODELLED, read_rows(*[DATA / "recorded" / "rounds-2gpu.parquet"] * 2), *pair)
