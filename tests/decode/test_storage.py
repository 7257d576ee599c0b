"""Runs and fields on disk: round trips are equal to the last bit, and the files of version 1 stay readable.

`tests/golden/make_parquet_v1.py` made the committed files; they are never made anew with a later schema.
"""

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import kdlab
from kdlab.decode.field import DraftField, PromptField
from kdlab.decode.storage import load_field, load_run, save_field, save_run
from kdlab.errors import ArgumentError, SchemaError, TreeError
from kdlab.tree import DraftTree, check_tree
from tests.golden.make_parquet_v1 import PROVENANCE, example_field, example_run
from tests.pairs import golden_prompts, tiny_pair

GOLDEN = Path(__file__).parents[1] / "golden"


def assert_same(got, expected, where="value"):
    """Compare dataclasses, lists, arrays and tensors: types, dtypes, shapes and bits."""
    assert type(got) is type(expected), where
    if dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(got, field.name), getattr(expected, field.name), f"{where}.{field.name}")
    elif isinstance(expected, torch.Tensor):
        as_bits = [x.view(torch.int32) if x.dtype == torch.uint32 else x for x in (got, expected)]
        assert got.dtype == expected.dtype, where
        assert_same(*(x.numpy() for x in as_bits), where)
    elif isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
        assert got.tobytes() == expected.tobytes(), where
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for i, pair in enumerate(zip(got, expected, strict=True)):
            assert_same(*pair, f"{where}[{i}]")
    else:
        assert got == expected, where


def change(value):
    """Return `value` with one bit of it wrong."""
    if isinstance(value, torch.Tensor):
        return torch.from_numpy(change(value.view(torch.int32).numpy())).view(value.dtype) if value.numel() else None
    if isinstance(value, np.ndarray):
        changed = value.copy()
        changed.reshape(-1).view(np.uint8)[0] ^= 1
        return changed
    return (*value, 1) if isinstance(value, tuple) else value + 1


def test_run_round_trip(tmp_path):
    save_run(example_run(), tmp_path / "run.parquet")
    loaded = load_run(tmp_path / "run.parquet")
    assert_same(loaded, example_run())
    assert loaded.round_lengths == [[3, 1], [1], []]
    for records in loaded.rounds:
        for record in records:
            check_tree(record.tree)


def test_field_round_trip(tmp_path):
    save_field(example_field(), tmp_path / "field.parquet")
    loaded = load_field(tmp_path / "field.parquet")
    assert_same(loaded, example_field())
    assert loaded.prompts[0].next_ids.tolist() == [[5, 2], [2, 7], [7, 8]]
    loaded.prompts[0].log_probs[0] = 0.0  # own memory, not the file's


@pytest.mark.parametrize("name", ["target_tokens", "path", "bonus", "expert_ids", "anchor_position", "tree"])
def test_the_comparison_sees_a_changed_record(name):
    record = example_run().rounds[0][0]
    if name == "tree":
        changed = dataclasses.replace(record.tree, missed_mass=change(record.tree.missed_mass))
    else:
        changed = change(getattr(record, name))
    with pytest.raises(AssertionError, match=name):
        assert_same(dataclasses.replace(record, **{name: changed}), record)


def test_a_real_run_and_a_real_field(tmp_path):
    pair, prompts = tiny_pair(), golden_prompts()[:2]
    run = kdlab.generate(pair, prompts, method="ddtree", budget=7, max_new_tokens=12, record_experts=True)
    save_run(run, tmp_path / "run.parquet")
    assert_same(load_run(tmp_path / "run.parquet"), run)
    assert run.rounds[0][0].expert_ids is not None
    field = kdlab.record(pair, prompts, top_k=8, max_new_tokens=12)
    save_field(field, tmp_path / "field.parquet")
    assert_same(load_field(tmp_path / "field.parquet"), field)


def test_version_1_files_stay_readable():
    run, field = load_run(GOLDEN / "rounds-v1.parquet"), load_field(GOLDEN / "field-v1.parquet")
    assert_same(run, example_run())
    assert_same(field, example_field())
    record = run.rounds[0][0]
    assert record.tree.token.tolist() == [[3, 7, 9, 8, 9]]
    assert record.tree.parent.tolist() == [[-1, 0, 1, 0, 3]]
    assert record.tree.logp[0].tolist() == pytest.approx([0, np.log(0.5), np.log(0.375), np.log(0.25), np.log(0.1875)])
    assert record.tree.missed_mass[0].tolist() == pytest.approx([0.25, 0.125, 1.0])
    assert (record.path, record.bonus, record.anchor_position, record.nonfinite_draft_rows) == ((0, 1, 2), 6, 5, 1)
    assert record.expert_ids[1, 2].tolist() == [14, 15]
    assert run.prompts[0].text == "héllo"
    assert run.finish == ["length", "context", "stop"]
    assert run.provenance == field.provenance == PROVENANCE
    assert field.prompts[0].token_ids[2].tolist() == [[8, 9], [10, 11]]
    assert field.prompts[1].next_log_prob.tolist() == [[-0.125, -3.0]]
    assert (field.top_k, field.vocab_size, field.depth_limit) == (2, 14, 2)


def test_files_are_open_to_any_parquet_reader():
    rounds = pq.read_table(GOLDEN / "rounds-v1.parquet").to_pylist()
    assert [(row["prompt_id"], row["round"], row["num_tokens"]) for row in rounds] == [
        ("greeting", 0, 3), ("greeting", 1, 1), ("1", 0, 1),
    ]  # fmt: skip
    assert rounds[0]["depths"] == [0, 1, 2, 1, 2]
    assert rounds[2]["expert_ids"] is None
    positions = pq.read_table(GOLDEN / "field-v1.parquet").to_pylist()
    assert [(row["prompt"], row["position"], row["output_id"]) for row in positions] == [
        (0, 0, 4), (0, 1, 5), (0, 2, 2), (1, 0, 13),
    ]  # fmt: skip


def test_nothing_recorded_is_kept_as_nothing(tmp_path):
    empty = dataclasses.replace(example_run(), rounds=[[], [], []], provenance={})
    save_run(empty, tmp_path / "run.parquet")
    assert_same(load_run(tmp_path / "run.parquet"), empty)
    field = DraftField([], top_k=2, vocab_size=14, depth_limit=2, provenance={})
    save_field(field, tmp_path / "field.parquet")
    assert_same(load_field(tmp_path / "field.parquet"), field)


def test_one_kind_is_not_read_as_the_other():
    with pytest.raises(SchemaError, match="kind 'draft_field', got 'rounds'"):
        load_field(GOLDEN / "rounds-v1.parquet")
    with pytest.raises(SchemaError, match="kind 'rounds', got 'draft_field'"):
        load_run(GOLDEN / "field-v1.parquet")


def rewrite(source, target, edit_row=lambda row: None, edit_table=lambda table: table):
    table = pq.read_table(source)
    metadata = table.schema.metadata
    row = json.loads(metadata[b"run"])
    edit_row(row)
    pq.write_table(edit_table(table).replace_schema_metadata({**metadata, b"run": json.dumps(row).encode()}), target)


def test_a_file_whose_parts_do_not_fit_is_refused(tmp_path):
    def one_round_less(row):
        row["prompts"][0]["num_rounds"] -= 1

    def other_top_k(row):
        row["top_k"] = 3

    rewrite(GOLDEN / "rounds-v1.parquet", tmp_path / "run", one_round_less)
    with pytest.raises(SchemaError, match="expected 2 rows, as the run row says, got 3"):
        load_run(tmp_path / "run")
    rewrite(GOLDEN / "field-v1.parquet", tmp_path / "field", other_top_k)
    with pytest.raises(SchemaError, match=r"token_ids: expected \[3, 2, 3\] values, got 12"):
        load_field(tmp_path / "field")


def test_a_recorded_tree_that_is_none_is_refused(tmp_path):
    def cycle(table):
        parents = table["parents"].to_pylist()
        parents[0] = [-1, 2, 1, 0, 3]
        place = table.column_names.index("parents")
        return table.set_column(place, "parents", pa.array(parents, pa.list_(pa.int32())))

    rewrite(GOLDEN / "rounds-v1.parquet", tmp_path / "run", edit_table=cycle)
    with pytest.raises(TreeError, match="cycle"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("log_probs", lambda array: array[:2]),
        ("token_ids", lambda array: array + 100),
        ("next_rank", lambda array: array - 50),
        ("tail_ids", lambda array: array[1:]),
        ("output_ids", lambda array: array.astype(np.float32)),
        ("num_starts", lambda count: count + 9),
    ],
)
def test_a_field_that_contradicts_itself_is_never_made(name, change):
    field = example_field()
    wrong = dataclasses.replace(field.prompts[0], **{name: change(getattr(field.prompts[0], name))})
    with pytest.raises(ArgumentError, match=f"prompt 'greeting': {name}: expected "):
        dataclasses.replace(field, prompts=[wrong])


def test_a_large_field_loads_quickly_and_exactly(tmp_path):
    rng, shape = np.random.default_rng(0), (500, 15, 256)
    prompt = PromptField(
        prompt=0,
        prompt_id="long",
        kind="text",
        prompt_ids=np.zeros(5, np.int32),
        output_ids=rng.integers(0, 163840, shape[0]).astype(np.int32),
        tail_ids=np.zeros(16, np.int32),
        num_starts=500,
        token_ids=rng.integers(0, 163840, shape).astype(np.int32),
        log_probs=rng.normal(size=shape).astype(np.float32),
        next_log_prob=rng.normal(size=shape[:2]).astype(np.float32),
        next_rank=rng.integers(0, 163840, shape[:2]).astype(np.int32),
    )
    field = DraftField([prompt], top_k=256, vocab_size=163840, depth_limit=15)
    save_field(field, tmp_path / "field")
    begin = time.perf_counter()
    loaded = load_field(tmp_path / "field")
    assert time.perf_counter() - begin < 5.0  # 0.1 s here; a value a Python object would take over 10 s
    assert_same(loaded, field)


@pytest.mark.gpu
def test_trees_on_a_gpu_are_saved_too(tmp_path):
    run = example_run()
    rounds = [[dataclasses.replace(r, tree=r.tree.to("cuda")) for r in records] for records in run.rounds]
    save_run(dataclasses.replace(run, rounds=rounds), tmp_path / "run")
    assert_same(load_run(tmp_path / "run"), run)
    assert isinstance(rounds[0][0].tree, DraftTree)
