"""Traces of others: both forms give the same, every fault is found with its line, and rounds claim no other budget."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kdlab
from kdlab import study
from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study.compare import TRACE_FIELDS, check_comparable
from kdlab.study.traces.rules import ENGINE_RULES, PROVENANCE_RULES, ROUND_PROVENANCE_RULES
from tests.pairs import tiny_pair
from tests.study.traces import EXAMPLES, PAGE, PROVENANCE, known_field, made_trace


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
