"""Traces of others: both forms give the same, every fault is found with its line, and rounds claim no other budget."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import kdlab
from kdlab import study
from kdlab.decode.field import DraftField
from kdlab.errors import ArgumentError, ComparisonError, SchemaError
from kdlab.parquet import write_table
from kdlab.study.compare import TRACE_FIELDS, check_comparable
from kdlab.study.traces_rounds import ROUND_TRACE_FORMAT
from kdlab.study.traces_rules import ENGINE_RULES, PROVENANCE_RULES, ROUND_PROVENANCE_RULES
from tests.pairs import tiny_pair
from tests.study.fields import draft_field

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: (\S+) -->\n```json\n(.*?)```", PAGE, re.DOTALL))
ROUNDS = EXAMPLES["rounds.jsonl"].splitlines()
PROVENANCE = json.loads(ROUNDS[0])["provenance"]
KIND = {"kdlab_kind": "trace_rounds", "kdlab_schema_version": 1}


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


def made_trace(num_prompts=6, **provenance):
    rng = np.random.default_rng(3)
    rows = [
        {"prompt_id": f"q{prompt}", "kind": "code", "round": number, "accepted": int(rng.integers(0, 8)), "drafted": 7}
        for prompt in range(num_prompts)
        for number in range(4)
    ]
    return study.round_trace(rows, PROVENANCE | provenance)


def known_field(**options) -> DraftField:
    field = draft_field(**options)
    return replace(
        field, provenance={key: value for key, value in PROVENANCE.items() if key not in ("method", "budget")}
    )


def test_the_page_lists_every_field():
    listed = set(re.findall(r"`(\w+)`", PAGE))
    assert {*PROVENANCE_RULES, *ENGINE_RULES, *ROUND_PROVENANCE_RULES} <= listed


def test_the_worked_example_of_rounds_is_read(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_text(EXAMPLES["rounds.jsonl"])
    assert study.check_trace(path) == []
    row = study.trace_summary(study.load_trace(path)).iloc[0]
    assert (row["method"], row["setting"], row["rows_per_round"], row["num_rounds"]) == ("chain", 7.0, 8.0, 5)
    assert row["tokens_per_round"] == pytest.approx(3.4)
    assert np.isnan(row["tokens_per_round_low"])


def test_the_worked_example_of_a_field_is_read_and_swept(tmp_path):
    path = tmp_path / "field.jsonl"
    path.write_text(EXAMPLES["field.jsonl"])
    field = study.load_trace(path)
    assert study.sweep(field, [0, 2])["round_lengths"].tolist() == [[1, 1], [3]]
    summary = study.trace_summary(field)
    assert set(summary["method"]) == {"ddtree", "chain", "ar"}


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("rounds.jsonl").write_text(EXAMPLES["rounds.jsonl"])
    Path("other.jsonl").write_text(EXAMPLES["rounds.jsonl"].replace('"method": "chain"', '"method": "tree"'))
    names: dict[str, object] = {}
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, names)
    assert len(names["table"]) == 4
    assert "chain of budget 7 alone" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rounds_survive_both_forms(tmp_path, suffix):
    rows = [{"prompt_id": "a", "kind": "x", "round": 0, "accepted": 2, "drafted": 3, "parents": [-1, 0, 0, 2]},
            {"prompt_id": "a", "kind": "x", "round": 1, "accepted": 0, "drafted": 0, "parents": None}]  # fmt: skip
    trace = study.round_trace(rows, PROVENANCE | {"method": "ddtree", "mine": [1]})
    study.save_trace(trace, tmp_path / f"t.{suffix}")
    back = study.load_trace(tmp_path / f"t.{suffix}")
    assert (back.prompts, back.provenance) == (trace.prompts, trace.provenance)
    assert list(back.rows()) == rows
    assert [file.name for file in tmp_path.iterdir()] == [f"t.{suffix}"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_field_survives_both_forms(tmp_path, suffix):
    field = known_field(top_k=4, stop=True)
    field.prompts[1].log_probs[3, 1] = np.nan
    field.prompts[1].next_log_prob[3, 1] = np.nan
    study.save_trace(field, tmp_path / f"f.{suffix}")
    back = study.load_trace(tmp_path / f"f.{suffix}")
    assert back.provenance == field.provenance
    for mine, other in zip(field.prompts, back.prompts, strict=True):
        for name, value in vars(mine).items():
            np.testing.assert_array_equal(getattr(other, name), value, err_msg=name)
    assert study.sweep(back, [3]).equals(study.sweep(field, [3]))


def test_recordings_of_kdlab_are_traces_too_and_their_arm_is_the_recordings_own(tmp_path):
    pair, prompts = tiny_pair(), ["the dog ", "5+40="]
    field = kdlab.record(pair, prompts, top_k=8, max_new_tokens=16)
    run = kdlab.generate(pair, prompts, method="ddtree", budget=5, max_new_tokens=16)
    kdlab.save_field(field, tmp_path / "field.parquet")
    kdlab.save_run(run, tmp_path / "run.parquet")
    assert study.check_trace(tmp_path / "field.parquet") == study.check_trace(tmp_path / "run.parquet") == []
    study.save_trace(study.load_trace(tmp_path / "field.parquet"), tmp_path / "field.jsonl")
    swept = study.sweep(study.load_trace(tmp_path / "field.jsonl"), [5])
    study.save_trace(study.load_trace(tmp_path / "run.parquet"), tmp_path / "run.jsonl")
    trace = study.load_trace(tmp_path / "run.jsonl")
    measured = study.traces_table(trace)
    shared = [name for name in swept.columns if name not in ("top_k", "rows_per_round", "round_rows")]
    assert measured[shared].to_dict("records") == swept[shared].to_dict("records")
    check_comparable([field.provenance, trace.provenance], fields=TRACE_FIELDS)


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


def test_rounds_give_their_own_arm_with_its_interval():
    trace = made_trace(num_prompts=6)
    row = study.trace_summary(trace).iloc[0]
    lengths = [accepted + 1 for prompt in trace.prompts for accepted in prompt.accepted]
    assert row["tokens_per_round"] == pytest.approx(np.mean(lengths))
    assert row["tokens_per_round_low"] < row["tokens_per_round"] < row["tokens_per_round_high"]
    assert study.length_histogram(study.traces_table(trace))["num_rounds"].sum() == 24
    assert "chain of budget 7 alone" in study.trace_limits(trace)[0]
    assert not any("interval" in line for line in study.trace_limits(trace))
    assert any("Not known: target_sha256" in line for line in study.trace_limits(trace))


@pytest.mark.parametrize(
    "ask",
    [
        lambda trace: study.sweep(trace, [3, 7]),
        study.sweep_chains,
        study.sweep_ar,
        lambda trace: study.acceptance_by_depth(trace, 7),
        study.calibration,
        study.min_budget,
        lambda trace: study.trace_summary(trace, [3, 7]),
    ],
)
def test_rounds_are_asked_for_no_other_budget(ask):
    with pytest.raises(ArgumentError, match=r"rounds.* say nothing of other budgets than their own 7"):
        ask(made_trace())


@pytest.mark.parametrize("name", TRACE_FIELDS)
def test_traces_of_other_provenance_do_not_stand_together(name):
    first, second = made_trace(), made_trace(method="tree", engine="another 1.0")
    assert set(study.traces_table([first, second])["method"]) == {"chain", "tree"}
    other = replace(second, provenance={**second.provenance, name: "other"})
    with pytest.raises(ComparisonError, match=f"^{name}: "):
        study.traces_table([first, other])


def test_engines_that_share_an_arm_are_summarized_apart():
    table = study.traces_table([made_trace(), made_trace(engine="another 1.0")])
    summary = study.summarize(table, by=("engine", "method", "setting"))
    assert summary["engine"].tolist() == ["my-engine 1.4", "another 1.0"]
    with pytest.raises(ArgumentError, match="each prompt once in a group"):
        study.summarize(table)


def test_simulated_rounds_are_marked():
    assert study.traces_table(made_trace(simulated=True))["simulated"].all()
    assert not study.traces_table(made_trace())["simulated"].any()
    with pytest.raises(ArgumentError, match="traces: expected a RoundTrace"):
        study.traces_table([])
