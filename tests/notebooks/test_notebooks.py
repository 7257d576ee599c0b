"""The notebooks: their form, and a smoke run of each through the batch path."""

import ast
import html
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

import kdlab
from kdlab.bench import read_rows, write_rows
from kdlab.bench.kernels import kernel_table, verdict_lines
from kdlab.cli import main
from kdlab.errors import ComparisonError
from kdlab.paths import DATA
from kdlab.profiling import load_nsight, stage_shares
from kdlab.report import build_report, declared_parameters, read_notebook, run_notebook
from kdlab.report.pdf import find_browser
from tests.study.traces import EXAMPLES

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
COMMON = {"smoke": False, "full": False, "device": "cpu", "figures": "figures", "results": "runs"}
FIGURES = {
    "00_start_here": {"00_draft_tree", "00_rounds"},
    "10_budget_sweep": {
        "10_tokens_per_round", "10_by_kind", "10_by_depth", "10_by_rank", "10_round_lengths", "10_calibration",
        "10_live", "10_trace", "10_cost", "10_budget_sweep",
    },
    "20_draft_trees": {
        "20_draft_tree", "20_by_depth", "20_by_rank", "20_after_sibling", "20_calibration", "20_missed_mass",
    },
    "30_kernels": {
        "30_overview", "30_explorer", "30_errors", "30_attention", "30_attention_rank", "30_naive_reads", "30_logits",
        "30_trees", "30_experts", "30_cache",
    },
    "40_nsight": {
        "40_shares", "40_busy", "40_timeline_graph", "40_timeline_eager", "40_bytes", "40_roofline", "40_tensor",
    },
    "50_experts_and_cost": {
        "50_verdict", "50_contexts", "50_experts", "50_bytes", "50_fit", "50_speed", "50_phase", "50_gpus",
    },
    "90_report": {"90_tokens_per_round", "90_by_kind", "90_budget_sweep", "90_kernels"},
}  # fmt: skip
DRAWN = ("30_kernels", "40_nsight")
"""Notebooks that draw what a GPU left, and run no pair."""
PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = '<script>alert("kdlab")</script>\n```\n<img src=x onerror=alert(1)>\n"""Load settings."""\n'
"""A prompt that would run in the report if its markup were not text."""


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stripped_and_its_cells_are_short(path):
    notebook = read_notebook(path)
    nbformat.validate(notebook)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z][a-z-]+", cell_id) for cell_id in ids)
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None
        lines = cell.source.splitlines()
        assert len(lines) <= 15, cell.id
        assert max(map(len, lines)) <= 120, cell.id
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 10, cell.id


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_its_question_and_its_parameters(path):
    notebook = read_notebook(path)
    first, second = notebook.cells[:2]
    assert first.cell_type == "markdown"
    assert all(word in first.source for word in ("**Question.**", "**Needs.**", "**Takes**"))
    assert second.metadata.get("tags") == ["parameters"]
    declared = declared_parameters(notebook, path.name)
    assert {name: declared[name].default for name in COMMON} == COMMON
    assert all(parameter.help for parameter in declared.values())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_figure_has_a_heading_and_a_name(path):
    cells = read_notebook(path).cells
    names = set()
    for before, cell in pairwise(cells):
        saved = re.findall(r'figure_folder / "(\w+)\.png"', cell.source) if cell.cell_type == "code" else []
        if saved:
            assert before.cell_type == "markdown"
            assert before.source.startswith("## ")
            assert len(before.source.split("\n", 2)[2]) > 60
            assert "show_figure(" in cell.source
            names |= set(saved)
    assert names == FIGURES[path.stem]


@pytest.fixture(scope="module")
def smoke_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    given = {"smoke": True, "figures": str(folder / "figures"), "results": str(folder / "results")}
    trace = tmp_path_factory.mktemp("trace") / "rounds.jsonl"
    trace.write_text(EXAMPLES["rounds.jsonl"])
    more = {"00_start_here": {"prompt": HOSTILE}, "50_experts_and_cost": {"traces": [str(trace)]}}
    runs = {}
    for path in NOTEBOOKS:
        runs[path.stem] = run_notebook(path, given | more.get(path.stem, {}), folder / path.name, timeout_s=300)
    return folder, runs


@pytest.mark.notebook
def test_smoke_runs_finish_and_draw_every_figure(smoke_runs):
    folder, runs = smoke_runs
    assert set(runs) == set(FIGURES)
    for name, run in runs.items():
        assert run.record["final"] is True
        assert run.record["provenance"].get("pair") == (None if name in DRAWN else "bundled")
    for name in set().union(*FIGURES.values()):
        assert (folder / "figures" / f"{name}.png").read_bytes().startswith(PNG)


@pytest.mark.notebook
def test_smoke_runs_are_lossless_and_live_rounds_are_what_the_recording_predicts(smoke_runs):
    _, runs = smoke_runs
    assert runs["00_start_here"].record["lossless"] is True
    record = runs["10_budget_sweep"].record
    assert record["live equals recording"] is True
    assert record["live turns"] == 8
    assert record["best"]["budget"] in (7, 15)
    methods = [row["method"] for row in record["budget sweep"]]
    assert sorted(set(methods)) == ["ar", "chain", "ddtree"]


@pytest.mark.notebook
def test_smoke_runs_leave_readable_recordings(smoke_runs):
    results, runs = smoke_runs[0] / "results", smoke_runs[1]
    field = kdlab.load_field(results / "10_draft_field.parquet")
    assert sum(len(prompt.output_ids) for prompt in field.prompts) == runs["10_budget_sweep"].record["tokens recorded"]
    times = read_rows(results / "10_round_times.parquet")
    assert set(times["metric"]) == {"round_ms", "tokens_per_s", "tokens_per_round"}
    assert kdlab.load_run(results / "00_rounds.parquet").rounds[0]
    trace = kdlab.study.load_trace(results / "10_trace.jsonl")
    assert (trace.method, trace.budget) == ("ddtree", 15)


@pytest.mark.notebook
def test_the_explorer_notebook_keeps_the_rounds_that_it_shows(smoke_runs):
    results, run = smoke_runs[0] / "results", smoke_runs[1]["20_draft_trees"]
    rounds = kdlab.load_run(results / "20_rounds.parquet").rounds
    assert sum(map(len, rounds)) == run.record["rounds explored"] > 0
    assert kdlab.load_field(results / "20_draft_field.parquet").top_k == 128
    assert len(run.record["after an accepted sibling"]) == 3
    widgets = [
        output["data"] for cell in code_cells(read_notebook(run.output)) for output in cell.outputs
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {})
    ]  # fmt: skip
    for name, data in zip(["TreeExplorer", "AcceptanceExplorer"], widgets, strict=True):
        assert name in data["text/plain"]


@pytest.mark.notebook
def test_without_a_gpu_the_kernels_are_drawn_from_recorded_rows_and_every_figure_says_so(smoke_runs):
    run, rows = smoke_runs[1]["30_kernels"], read_rows(DATA / "recorded" / "kernels-h200.parquet")
    gpu, verdicts = rows["gpu"].iloc[0], verdict_lines(kernel_table(rows))
    assert run.record["conclusion"] == [f"Kernels, recorded on {gpu}: {verdicts[0]}."]
    assert run.record["missed, the worst ten"] == verdicts[1:11]
    text = run.output.read_text(encoding="utf-8")
    assert f"**Recorded** on {gpu}" in text
    for cell in code_cells(read_notebook(FOLDER / "30_kernels.ipynb")):
        if "show_figure(" in cell.source:
            assert re.search(r"notes=(notes|where|\[\*notes)", cell.source), cell.id


@pytest.mark.notebook
def test_without_a_gpu_the_rounds_are_drawn_from_recorded_launches_and_every_figure_says_so(smoke_runs):
    run, launches = smoke_runs[1]["40_nsight"], load_nsight()
    gpu, shares = launches["gpu"].iloc[0], stage_shares(launches)
    assert run.record["messages"] == []
    assert len(run.record["stage shares"]) == len(shares)
    (conclusion,) = run.record["conclusion"]
    assert conclusion.startswith(f"Where a round's time goes, on {gpu}: ")
    assert f"**recorded, not profiled on this machine**: {gpu}" in run.output.read_text(encoding="utf-8")
    for cell in code_cells(read_notebook(FOLDER / "40_nsight.ipynb")):
        if "viz.plot_" in cell.source:
            assert re.search(r"notes=(notes|\[\w+, \*notes\])", cell.source), cell.id


@pytest.mark.notebook
def test_the_verdict_comes_with_its_region_its_basis_and_what_would_turn_it(smoke_runs):
    record = smoke_runs[1]["50_experts_and_cost"].record
    assert record["times"] == "fitted"
    assert re.match(r"Of \d+ points \(text, routing, streams, context\) a tree of one size is", record["conclusion"][0])
    assert len(record["region"]) == 3 * 5
    assert len(record["conclusion"]) == 5 + 7  # the answer, and what would turn it
    assert {row["what"] for row in record["predictions"]} == {"fitted", "predicted"}
    for mark in ("Kimi-K2.6", "rounds.jsonl"):
        assert any(mark in row["figure"] for row in record["marked points"])
    assert 0.3 < record["exponents of the mini"]["tree"] < 1.0


def test_without_recorded_rounds_the_verdict_says_that_stages_stand_at_their_floors(tmp_path):
    cells = {cell.id: cell.source for cell in read_notebook(FOLDER / "50_experts_and_cost.ipynb").cells}
    shown, scope = [], {"display": lambda shown: None}
    exec(cells["parameters"], scope)
    scope |= {name: str(tmp_path / "none") for name in ("recorded", "recorded_reduces", "recorded_several")}
    exec(cells["setup"], scope)
    scope["display"] = lambda one: shown.append(getattr(one, "data", ""))
    exec(cells["evidence"], scope)
    exec(cells["fit"], scope)
    assert "every stage stands at its floor" in shown[0]
    assert shown[1].startswith("**Not drawn:** no none:")
    assert scope["notes"][0].startswith("NOT MEASURED")


@pytest.mark.notebook
def test_the_report_of_all_is_small_and_holds_the_coloured_text(smoke_runs):
    folder, runs = smoke_runs
    report = build_report([run.output for run in runs.values()], folder / "report.html")
    text = report.read_text(encoding="utf-8")
    num_figures = sum(map(len, FIGURES.values()))
    assert text.count("<img") == num_figures
    assert len(text) < 130_000 * num_figures
    assert "background-color:#" in text
    assert "RoundViewer" not in text


@pytest.mark.notebook
def test_markup_in_a_prompt_is_text_in_the_report_in_its_pdf_and_in_every_figure(smoke_runs, tmp_path):
    folder, _ = smoke_runs
    status = main(["report", str(folder), "-o", str(tmp_path / "report.html")])  # the smoke runs are a named run
    assert status == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<img src=x" not in text
    assert "&lt;script&gt;alert(" in text
    assert HOSTILE.rstrip() in html.unescape(text)
    for name in set().union(*FIGURES.values()):
        svg = (tmp_path / "figures" / f"{name}.svg").read_bytes()
        assert b"<script" not in svg
        assert (tmp_path / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF-")
    assert (tmp_path / "report.pdf").exists() == bool(find_browser())


@pytest.mark.notebook
def test_the_report_notebook_refuses_runs_that_differ(smoke_runs, tmp_path):
    recorded, names = tmp_path / "recorded", ("10_draft_field.parquet", "10_round_times.parquet")
    recorded.mkdir()
    for name in names:
        shutil.copyfile(smoke_runs[0] / "results" / name, tmp_path / name)
    cells = {cell.id: cell.source for cell in read_notebook(FOLDER / "90_report.ipynb").cells}

    def read_files():
        scope = {"display": lambda shown: None}
        exec(cells["parameters"], scope)
        scope |= {"recorded": str(recorded), "results": str(tmp_path)}
        exec(cells["setup"] + "\ndisplay = print\n" + cells["files"], scope)
        return scope["files"]

    assert list(read_files()["file"]) == list(names)
    rows = read_rows(tmp_path / names[1])
    other = [json.dumps(json.loads(text) | {"drafter_sha256": "other"}) for text in rows["provenance"]]
    write_rows(rows.assign(provenance=other), tmp_path / names[1])
    with pytest.raises(ComparisonError, match="drafter_sha256: results with"):
        read_files()


@pytest.mark.notebook
def test_without_recorded_counters_the_kernel_notebook_says_so_and_goes_on(tmp_path):
    parameters = {"figures": str(tmp_path), "recorded_counters": str(tmp_path / "none.parquet")}
    run = run_notebook(FOLDER / "30_kernels.ipynb", parameters, tmp_path / "out.ipynb", timeout_s=300)
    assert run.record["final"] is True
    assert any("no counters are recorded" in message for message in run.record["messages"])
    assert not (tmp_path / "30_naive_reads.png").exists()
