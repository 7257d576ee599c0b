"""Damaged and foreign result files: refused by name, never read as other numbers."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kdlab.decode.storage import load_field, load_run, save_field, save_run
from kdlab.errors import ArgumentError, SchemaError, TreeError
from tests.decode.test_storage import GOLDEN, assert_same, rewrite
from tests.golden.make_parquet_v1 import example_field, example_run


def test_flipped_bytes_never_load_as_other_numbers(tmp_path):
    generator = random.Random(0)
    for save, load, example in ((save_run, load_run, example_run()), (save_field, load_field, example_field())):
        save(example, tmp_path / "good")
        content = (tmp_path / "good").read_bytes()
        refused = 0
        for _ in range(150):
            damaged = bytearray(content)
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
            (tmp_path / "bad").write_bytes(damaged)
            try:
                loaded = load(tmp_path / "bad")
            except (SchemaError, TreeError):
                refused += 1
            else:
                assert_same(loaded, example)  # the flip hit what nobody reads, such as the writer's name
        assert refused > 90


@pytest.mark.parametrize("row", ["", "{", "[]", "null", "5", "{}", "[" * 100_000, '{"prompts": 5}', '{"prompts": [5]}'])
@pytest.mark.parametrize(("name", "load"), [("rounds-v1.parquet", load_run), ("field-v1.parquet", load_field)])
def test_a_run_row_of_another_form_is_refused(name, load, row, tmp_path):
    table = pq.read_table(GOLDEN / name)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"run": row.encode()}), tmp_path / "file")
    with pytest.raises(SchemaError, match="expected"):
        load(tmp_path / "file")


@pytest.mark.parametrize(
    ("source", "load", "key", "value"),
    [
        *(("rounds-v1.parquet", load_run, key, value)
          for key in ("id", "prompt_ids", "output_ids", "output_text", "num_rounds", "finish")
          for value in (None, -1, 1.5, [2**40], {}, True)),
        *(("field-v1.parquet", load_field, key, value)
          for key in ("prompt", "prompt_id", "prompt_ids", "tail_ids", "num_starts", "num_positions")
          for value in (None, -1, 10**9, 1.5, [2**40], {}, True)),
    ],
)  # fmt: skip
def test_an_entry_of_another_type_is_refused_by_name(source, load, key, value, tmp_path):
    rewrite(GOLDEN / source, tmp_path / "file", lambda row: row["prompts"][0].update({key: value}))
    with pytest.raises(SchemaError, match=f"^{tmp_path / 'file'}: "):
        load(tmp_path / "file")


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("path", lambda path: [*path, path[-1]]), ("path", lambda path: []), ("path", lambda path: [99] * len(path)),
        ("target_tokens", lambda tokens: tokens[:-1]), ("target_tokens", lambda tokens: [t + 1 for t in tokens]),
        ("missed_mass", lambda mass: mass[:-1]), ("depths", lambda depths: [depth + 1 for depth in depths]),
        ("bonus", lambda bonus: bonus + 1), ("num_tokens", lambda count: count + 1),
        ("round", lambda number: number + 1), ("prompt", lambda prompt: prompt + 1),
        ("depth_limit", lambda depth: 2**31 - 1), ("tokens", lambda tokens: [None] * len(tokens)),
    ],
)  # fmt: skip
def test_rounds_that_contradict_themselves_are_refused(column, change, tmp_path):
    def edit(table):
        place, kind = table.column_names.index(column), table.schema.field(column).type
        values = [change(value) for value in table[column].to_pylist()]
        return table.set_column(place, pa.field(column, kind), pa.array(values, kind))

    rewrite(GOLDEN / "rounds-v1.parquet", tmp_path / "file", edit_table=edit)
    with pytest.raises((SchemaError, TreeError), match=f"^{tmp_path / 'file'}: "):
        load_run(tmp_path / "file")


def test_a_round_with_another_tree_than_it_says_is_named_by_its_row(tmp_path):
    def edit(table):
        column = table.column_names.index("depths")
        depths = table["depths"].to_pylist()
        depths[1] = [depth + 1 for depth in depths[1]]
        field = table.schema.field("depths")
        return table.set_column(column, field, pa.array(depths, field.type))

    rewrite(GOLDEN / "rounds-v1.parquet", tmp_path / "file", edit_table=edit)
    with pytest.raises(SchemaError, match=f"^{tmp_path / 'file'}: row 1: depths: expected"):
        load_run(tmp_path / "file")


def test_rows_in_another_order_are_refused(tmp_path):
    for name, load in (("rounds-v1.parquet", load_run), ("field-v1.parquet", load_field)):
        rewrite(GOLDEN / name, tmp_path / name, edit_table=lambda table: table.take(list(range(table.num_rows))[::-1]))
        with pytest.raises((SchemaError, TreeError), match=f"^{tmp_path / name}: "):
            load(tmp_path / name)


@pytest.mark.parametrize("path", [None, 5, "a" * 5000])
def test_what_is_no_path_is_said(path):
    for load in (load_run, load_field):
        with pytest.raises((ArgumentError, FileNotFoundError)):
            load(path)


def test_other_things_are_not_saved(tmp_path):
    for save, wrong in ((save_run, example_field()), (save_field, example_run()), (save_run, None)):
        with pytest.raises(ArgumentError, match="expected a"):
            save(wrong, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
