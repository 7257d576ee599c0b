"""What is wrong with a trace is said with its line, every fault at once."""

import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

import kdlab
from kdlab import study
from kdlab.errors import ArgumentError, SchemaError
from kdlab.parquet import write_table
from kdlab.study.traces.rounds import ROUND_TRACE_FORMAT
from kdlab.study.traces.rules import ENGINE_RULES, PROVENANCE_RULES, ROUND_PROVENANCE_RULES
from tests.study.traces import EXAMPLES, KIND, PROVENANCE, ROUNDS, known_field, made_trace


@pytest.fixture
def faults(tmp_path):
    """Write lines as a trace and return what is said about it, without the file's name."""

    def check(lines):
        path = tmp_path / "t.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        found = study.check_trace(path)
        if found:
            with pytest.raises(SchemaError) as refused:
                study.load_trace(path)
            assert str(refused.value).startswith(found[0])
        return [fault.removeprefix(f"{path}") for fault in found]

    return check


@pytest.mark.parametrize(
    ("number", "change", "said"),
    [
        (3, {"accepted": 8}, ":3: accepted: expected at most the 7 drafted, got 8"),
        (3, {"drafted": 8}, ":3: drafted: expected at most the budget 7, got 8"),
        (2, {"round": 1}, ":2: round: expected 0, got 1"),
        (4, {"round": 1}, ":4: round: expected 2, got 1"),
        (4, {"kind": "prose"}, ":4: kind: expected 'code' as in the round before, got 'prose'"),
        (5, {"accepted": -1}, ":5: accepted: expected a count, got -1"),
        (5, {"accepted": True}, ":5: accepted: expected a count, got True"),
        (5, {"accepted": 1.0}, ":5: accepted: expected a count, got 1.0"),
        (5, {"prompt_id": ""}, ":5: prompt_id: expected a text that is not empty, got ''"),
        (5, {"accept": 1}, ":5: expected the keys prompt_id, kind, round, accepted, drafted, parents; unknown accept"),
        (6, {"prompt_id": "q-1"}, ":6: prompt_id: the rounds of 'q-1' do not stand together"),
        (3, {"parents": [-1, 0]}, ":3: parents: expected -1 of the root, then 7 nodes"),
        (3, {"drafted": 2, "parents": [-1, 0, 0]}, ":3: parents: node 2: expected 1 in a chain, got 0"),
        (3, {"drafted": 1, "parents": [-1, 1]}, ":3: parents: node 1: expected a node before it, got 1"),
    ],
)
def test_each_fault_of_a_round_is_said_with_its_line(faults, number, change, said):
    lines = [json.loads(line) for line in ROUNDS]
    lines[number - 1] |= change
    assert faults(lines)[0].startswith(said)


def test_a_tree_is_no_deeper_than_what_it_accepted():
    row = {"prompt_id": "a", "kind": "x", "round": 0, "accepted": 2, "drafted": 2, "parents": [-1, 0, 0]}
    with pytest.raises(SchemaError, match="accepted: expected at most the tree's depth 1, got 2"):
        study.round_trace([row], PROVENANCE | {"method": "tree"})


def test_all_faults_are_said_with_text_that_is_no_json_and_blank_lines(faults):
    bad = json.loads(ROUNDS[2]) | {"accepted": 9}
    found = faults([ROUNDS[0], ROUNDS[1], "", bad, "{", '{"accepted": NaN}', "[1]", '{"a": 1, "a": 2}'])
    assert [fault.split(":")[1] for fault in found] == ["5", "6", "8", "4", "7"]
    assert "NaN is no JSON; write null" in found[1]
    assert "a key stands twice" in found[2]


def test_text_that_is_no_utf8_is_named_with_its_line(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(ROUNDS[0].encode() + b"\n\xff\n" + ROUNDS[1].encode())
    assert study.check_trace(path)[0].startswith(f"{path}:2: expected a JSON object")


def test_half_a_character_is_no_text_wherever_it_stands(faults):
    """JSON admits it as an escape; no file that holds the trace would."""
    assert faults([ROUNDS[0].replace("my-engine", "my-\\ud83d"), ROUNDS[1]])[0].startswith(":1: expected a JSON object")
    assert faults([ROUNDS[0], ROUNDS[1].replace("q-1", "\\udcff")])[0].startswith(":2: expected a JSON object")
    assert faults([ROUNDS[0], ROUNDS[1].replace("q-1", "\\ud83d\\ude42")]) == []


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("{", ":1: expected a JSON object"),
        ({}, ":1: expected a header with kdlab_kind"),
        ([], ":1: expected a header"),
        (KIND | {"kdlab_kind": "rounds"}, ":1: kdlab_kind: expected one of trace_rounds, draft_field"),
        (KIND | {"kdlab_schema_version": 0}, ":1: kdlab_schema_version: expected a count"),
        (KIND | {"kdlab_schema_version": 2}, ":1: kdlab_schema_version: 2 of 'trace_rounds' is newer"),
        (KIND, ":1: provenance: expected an object, got None"),
        (KIND | {"provenance": PROVENANCE, "x": 1}, ":1: unknown keys x"),
    ],
)  # fmt: skip
def test_headers_that_are_none_are_refused(faults, header, said):
    assert faults([header, *ROUNDS[1:]])[0].startswith(said)


@pytest.mark.parametrize("name", [*PROVENANCE_RULES, *ENGINE_RULES, *ROUND_PROVENANCE_RULES])
def test_every_field_of_the_provenance_is_asked_for(faults, name):
    header = json.loads(ROUNDS[0])
    del header["provenance"][name]
    assert faults([header, *ROUNDS[1:]])[0].startswith(f":1: provenance.{name}: expected ")
    header["provenance"][name] = [1]
    assert faults([header, *ROUNDS[1:]])[0].startswith(f":1: provenance.{name}: expected ")


def test_a_trace_without_a_round_is_none(faults):
    assert faults(ROUNDS[:1]) == [":1: expected at least one round, got none"]


FIELD = EXAMPLES["field.jsonl"].splitlines()


@pytest.mark.parametrize(
    ("number", "change", "said"),
    [
        (1, {"top_k": 0}, ":1: top_k: expected a count of at least 1, got 0"),
        (1, {"top_k": 3}, ":2: token_ids: expected 6 values, got 4 values"),
        (1, {"prompts": []}, ":1: prompts: expected a list of at least one"),
        (2, {"position": 1}, ":2: position: expected 0, got 1"),
        (2, {"token_ids": [1, 1, 3, 0]}, ":2: slot 0: token_ids: expected distinct tokens"),
        (2, {"token_ids": [2, 1, 3, 0]}, ":2: slot 0: next_rank: expected the place of the text's next token"),
        (2, {"token_ids": [1, 2, 3, 4]}, ":2: token_ids: expected integers of 0 to 3, got 4"),
        (2, {"log_probs": [-1.61, -0.36, -0.92, -1.2]}, ":2: slot 0: log_probs: expected the best candidate first"),
        (2, {"log_probs": [-0.36, -0.5, -0.92, -1.2]}, ":2: slot 0: log_probs: expected probabilities of at most 1"),
        (2, {"log_probs": [0.5, -0.5, -0.92, -1.2]}, ":2: log_probs: expected log-probabilities or null, got 0.5"),
        (2, {"next_log_prob": [-0.36, -0.5]}, ":2: slot 1: next_log_prob: expected what log_probs says"),
        (3, {"next_rank": [1, 1]}, ":3: slot 1: next_rank: expected the place"),
        (3, {"next_rank": [1]}, ":3: next_rank: expected 2 values, got 1 values"),
        (3, {"output_id": None}, ":3: output_id: expected a count, got None"),
        (3, {"output_id": 9}, ":1: prompt 'p': output_ids: expected at most 3, got 9"),
    ],
)
def test_each_fault_of_a_field_is_said_with_its_line(faults, number, change, said):
    lines = [json.loads(line) for line in FIELD]
    lines[number - 1] |= change
    assert faults(lines)[0].startswith(said)


def test_a_field_with_too_few_or_too_many_positions_is_refused(faults):
    assert faults(FIELD[:2]) == [": expected 2 positions, as the header says, got 1"]
    assert faults([*FIELD, FIELD[2]]) == [":4: a position more than the header says"]


def test_a_shift_by_one_slot_is_found(tmp_path):
    field = known_field(top_k=4)
    study.save_trace(field, tmp_path / "f.parquet")
    shifted = replace(field.prompts[2], next_rank=np.roll(field.prompts[2].next_rank, 1, axis=1))
    broken = replace(field, prompts=[*field.prompts[:2], shifted])
    kdlab.save_field(broken, tmp_path / "f.parquet")
    assert re.search(r"f\.parquet: row 4\d: slot \d: next_rank", study.check_trace(tmp_path / "f.parquet")[0])
    with pytest.raises(SchemaError, match="next_rank"):
        study.save_trace(broken, tmp_path / "g.jsonl")


def test_parquet_of_others_is_checked_by_row(tmp_path):
    rows = [json.loads(line) for line in ROUNDS[1:]]
    rows[3]["accepted"] = 8
    columns = {f.name: pa.array([row.get(f.name) for row in rows], f.type) for f in ROUND_TRACE_FORMAT.fields}
    path = tmp_path / "t.parquet"
    write_table(path, columns, ROUND_TRACE_FORMAT, {"run": json.dumps({"provenance": PROVENANCE})})
    assert study.check_trace(path) == [f"{path}: row 3: accepted: expected at most the 7 drafted, got 8"]
    write_table(path, columns, ROUND_TRACE_FORMAT)
    assert "'run' in its metadata" in study.check_trace(path)[0]
    write_table(path, columns, replace(ROUND_TRACE_FORMAT, kind="points"))
    assert "expected a table of kind trace_rounds" in study.check_trace(path)[0]
    path.write_bytes(b"PAR1")
    assert "not a readable Parquet file" in study.check_trace(path)[0]


def test_files_that_are_not_there_and_other_names(tmp_path):
    with pytest.raises(FileNotFoundError):
        study.load_trace(tmp_path / "none.jsonl")
    for call in (study.load_trace, study.check_trace, lambda path: study.save_trace(made_trace(), path)):
        with pytest.raises(ArgumentError, match=r"ends in \.jsonl or \.parquet"):
            call(tmp_path / "t.csv")


def test_what_breaks_the_rules_is_not_written(tmp_path):
    trace = made_trace()
    with pytest.raises(SchemaError, match=r"provenance\.target"):
        study.save_trace(replace(trace, provenance={**trace.provenance, "target": ""}), tmp_path / "t.jsonl")
    with pytest.raises(ArgumentError, match="trace"):
        study.save_trace([1], tmp_path / "t.jsonl")
    assert list(tmp_path.iterdir()) == []
