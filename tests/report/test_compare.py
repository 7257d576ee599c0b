"""Two named runs compared: matched by what was given and measured, refused where they differ in anything else."""

import json
import re

import numpy as np
import pytest

from kdlab import load_field, save_field
from kdlab.bench.rows import bench_row, rows_frame, write_rows
from kdlab.cli import main
from kdlab.errors import ArgumentError, ComparisonError, SchemaError
from kdlab.report import compare_runs, find_run
from kdlab.report.pdf import find_browser
from kdlab.study import sweep
from kdlab.viz import paired_sentences
from tests.golden.make_parquet_v1 import PROVENANCE
from tests.report.test_named import point
from tests.study.fields import draft_field

PROMPTS = list(range(10))


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setattr("kdlab.report.named.RUNS", tmp_path / "runs")
    monkeypatch.setattr("kdlab.report.named.GRIDS", tmp_path / "runs" / "grids")
    monkeypatch.chdir(tmp_path)


def measured(folder, *, faster=1.0, case=None, simulated=False, parameters=None, method="ddtree", **facts):
    """Write a point whose rounds of two samples a prompt take (10 + prompt) / faster milliseconds."""
    point(folder, parameters=parameters)
    provenance = PROVENANCE | {"graph": "eager", "streams": 1, "temperature": 0.0} | facts
    samples = [(10.0 + prompt) / faster for prompt in PROMPTS for _ in range(2)]
    named = {"method": method, "setting": 7.0, "simulated": simulated}
    prompts = {"sample_prompts": [prompt for prompt in PROMPTS for _ in range(2)]}
    sizes = case or {"seed": 0}
    row = bench_row("round", "round_ms", "ms", provenance=provenance, case=sizes, samples=samples, **named)
    other = bench_row("copy", "time_us", "us", provenance=provenance, case={}, samples=[1.0, 2.0])
    write_rows(rows_frame([row | prompts, other]), folder / "10_round_times.parquet")


def runs(tmp_path, first=None, second=None):
    measured(tmp_path / "runs" / "a", **(first or {}))
    measured(tmp_path / "runs" / "b", **(second or {}))
    return find_run("a"), find_run("b")


def test_a_change_is_found_with_its_size_and_its_sign_test(tmp_path):
    found = compare_runs(*runs(tmp_path, second={"faster": 1.25}))
    [row] = found.table.to_dict("records")
    assert (row["method"], row["metric"], row["num_prompts"], row["lower"]) == ("ddtree", "round_ms", 10, 10)
    assert row["change"] == pytest.approx(-0.2)
    assert row["median_first"] == pytest.approx(14.5)
    assert row["p_adjusted"] == pytest.approx(2 / 2**10)
    said = paired_sentences(found.table)
    assert said[0] == "1 measurement compared, 1 changed."
    assert "−20 %" in said[1]


def test_equal_runs_show_no_change(tmp_path):
    table = compare_runs(*runs(tmp_path)).table
    assert paired_sentences(table) == ["1 measurement compared, 0 changed."]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("graph", "graph"), ("streams", 8), ("drafter_sha256", "other"), ("prompt_set_digest", "other"),
        ("template_hash", "other"), ("concurrency", 4), ("temperature", 0.6), ("gpu_uuid", "other"),
    ],
)  # fmt: skip
def test_runs_that_differ_in_another_field_are_refused_by_its_name(tmp_path, field, value):
    pair = runs(tmp_path, second={field: value})
    with pytest.raises(ComparisonError, match=f"{field}: results with"):
        compare_runs(*pair)
    if field != "prompt_set_digest":
        assert len(compare_runs(*pair, about=[field]).table) == 1


def test_a_size_that_differs_is_named_and_may_be_what_the_comparison_is_about(tmp_path):
    pair = runs(tmp_path, second={"case": {"seed": 0, "top_k": 8}}, first={"case": {"seed": 0, "top_k": 4}})
    with pytest.raises(ComparisonError, match="top_k: results with 4 and 8"):
        compare_runs(*pair)
    measured(tmp_path / "runs" / "a", case={"seed": 0, "temperature": 0.0}, temperature=0.0)
    measured(tmp_path / "runs" / "b", case={"seed": 0, "temperature": 0.6}, temperature=0.6)
    assert len(compare_runs(*pair, about=["temperature"]).table) == 1


def test_a_comparison_about_the_prompts_or_about_nothing_known_is_refused(tmp_path):
    pair = runs(tmp_path)
    with pytest.raises(ArgumentError, match="paired by them"):
        compare_runs(*pair, about=["prompt_set_digest"])
    with pytest.raises(ArgumentError, match="got colour"):
        compare_runs(*pair, about=["colour"])


def test_points_of_grids_match_by_their_parameters(tmp_path):
    for name, speeds in {"a": {7: 1.0, 15: 1.0, 31: 1.0}, "b": {15: 2.0, 7: 1.25, 63: 1.0}}.items():
        for budget, faster in speeds.items():
            folder = tmp_path / "runs" / name / f"{name}{budget}"
            measured(folder, faster=faster, parameters={"budget": budget, "drafter": name})
    pair = find_run("a"), find_run("b")
    with pytest.raises(ComparisonError, match="no measurement"):
        compare_runs(*pair)
    found = compare_runs(*pair, about=["drafter"])
    assert {row["point"]: row["change"] for row in found.table.to_dict("records")} == {
        "a15": pytest.approx(-0.5), "a7": pytest.approx(-0.2)
    }  # fmt: skip
    assert found.unmatched == ("point a31 only in a", "point b63 only in b")
    with pytest.raises(ComparisonError, match="points that differ only in"):
        compare_runs(*pair, about=["budget", "drafter"])


def test_measurements_of_one_run_alone_are_said_not_compared(tmp_path):
    pair = runs(tmp_path, second={"method": "chain"})
    with pytest.raises(ComparisonError, match=r"round ddtree 7\.0 round_ms only in a"):
        compare_runs(*pair)


def test_simulated_rows_are_no_change(tmp_path):
    found = compare_runs(*runs(tmp_path, second={"faster": 2.0, "simulated": True}))
    assert paired_sentences(found.table) == ["1 measurement compared, 0 changed (1 are simulated: no measurement)."]


def test_draft_fields_are_compared_by_their_tokens_per_round(tmp_path):
    for name, follow in {"a": 0.2, "b": 0.95}.items():
        point(tmp_path / "runs" / name)
        field = draft_field(num_prompts=8, follow=follow, vocab_size=10, top_k=10)
        save_field(field, tmp_path / "runs" / name / "10_draft_field.parquet")
    table = compare_runs(find_run("a"), find_run("b")).table.set_index("method")
    assert list(table.index) == ["ddtree", "chain"]
    assert table.loc["ddtree", "setting"] == 7
    assert (table["change"] > 0).all()
    assert (table["num_prompts"] == 8).all()
    field = load_field(tmp_path / "runs" / "a" / "10_draft_field.parquet")
    rows = sweep(field, [7])
    per_prompt = [sum(lengths) / len(lengths) for lengths in rows["round_lengths"]]
    assert table.loc["ddtree", "median_first"] == pytest.approx(np.median(per_prompt))


def test_a_damaged_table_is_named(tmp_path):
    pair = runs(tmp_path)
    (tmp_path / "runs" / "b" / "10_round_times.parquet").write_bytes(b"no table")
    with pytest.raises(SchemaError, match="10_round_times"):
        compare_runs(*pair)


def test_the_command_writes_page_figure_and_pdf_and_escapes_names(tmp_path, capsys):
    evil = "b<script>1<"
    measured(tmp_path / "runs" / "a")
    measured(tmp_path / "runs" / evil, faster=1.25)
    assert main(["report", "--compare", "a", evil, "-o", "out/x.html"]) == 0
    out = capsys.readouterr().out
    assert "−20 %" in out
    assert re.search(r"yes\n", out)
    html = (tmp_path / "out" / "x.html").read_text()
    assert "<script" not in html
    assert "b&lt;script&gt;1&lt;" in html
    assert html.count("<img") == 1
    assert "did not take turns" in html
    assert sorted(path.name for path in (tmp_path / "out" / "figures").iterdir()) == [
        "comparison.pdf", "comparison.png", "comparison.svg"
    ]  # fmt: skip
    assert b"<script" not in (tmp_path / "out" / "figures" / "comparison.svg").read_bytes()
    assert (tmp_path / "out" / "x.pdf").exists() == bool(find_browser())
    assert main(["report", "--compare", "a", evil, "--json", "--no-pdf"]) == 0
    assert json.loads(capsys.readouterr().out)["table"][0]["lower"] == 10


def test_the_command_refuses_an_unfinished_run_and_unlike_ones(tmp_path, capsys):
    measured(tmp_path / "runs" / "a")
    measured(tmp_path / "runs" / "b", graph="graph")
    assert main(["report", "--compare", "a", "b"]) == 2
    assert "graph: results with 'eager' and 'graph'" in capsys.readouterr().err
    (tmp_path / "runs" / "b" / "demo.done.json").unlink()
    assert main(["report", "--compare", "a", "b"]) == 3
    assert not (tmp_path / "reports").exists()
