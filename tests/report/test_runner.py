"""The runner: what counts as a finished run, what a failure leaves, and what is not run twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from kdlab.errors import ArgumentError, NotebookError, ParameterError
from kdlab.report import notebook_job, read_notebook, run_notebook
from kdlab.report.done_marker import is_done, marker_path, run_fingerprint
from tests.report.samples import FINAL, PARAMETERS

ALL = """\
import kdlab.report
kdlab.report.show_result({'got': [budget, rate, smoke, name, budgets, width], 'final': True})"""


def alive(marker: str) -> list[int]:
    """Return the processes whose command line holds `marker`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if marker.encode() in command and state != "Z":
            found.append(int(folder.name))
    return found


def wait_gone(marker: str, seconds: float = 10) -> list[int]:
    """Return what is still alive when the time is over."""
    until = time.monotonic() + seconds
    while alive(marker) and time.monotonic() < until:
        time.sleep(0.1)
    return alive(marker)


@pytest.mark.notebook
def test_a_run_takes_parameters_keeps_types_and_is_not_repeated(write_notebook, tmp_path):
    folder = tmp_path / "with {braces} and blanks"
    folder.mkdir()
    source = write_notebook("P:" + PARAMETERS, "import os\nprint(os.getcwd())", ALL, folder=folder)
    output, lines = tmp_path / "runs" / "demo.ipynb", []
    given = {"budget": 64, "rate": 1, "name": "007", "budgets": [1], "width": 1e-3}
    run = run_notebook(source, given, output, progress=lines.append)
    assert run.record["got"] == [64, 1.0, False, "007", [1], 1e-3]
    assert isinstance(run.record["got"][1], float)
    assert not run.skipped
    assert run.output == output
    assert any("cell" in line for line in lines)
    notebook = read_notebook(output)
    assert any(str(folder) in o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
    assert sorted(path.name for path in output.parent.iterdir()) == ["demo.done.json", "demo.ipynb"]
    assert sorted(path.name for path in folder.iterdir()) == ["demo.ipynb"]

    before = output.stat().st_mtime_ns
    again = run_notebook(source, given, output, skip_done=True)
    assert again.skipped
    assert again.record == run.record
    assert output.stat().st_mtime_ns == before


@pytest.mark.notebook
@pytest.mark.parametrize("change", ["parameter", "notebook", "output", "named file", "code"])
def test_a_finished_run_is_repeated_when_something_changed(write_notebook, tmp_path, monkeypatch, change):
    monkeypatch.setattr("kdlab.report.runner.NotebookJob.run", execute_nothing)
    monkeypatch.setattr("kdlab.report.done_marker.source_sha256", lambda: "code")
    named = tmp_path / "prompts.jsonl"
    named.write_text("{}")
    source, output = write_notebook("P:budget = 1\nprompts = ''", FINAL), tmp_path / "out.ipynb"
    given = {"budget": 1, "prompts": str(named)}
    assert not run_notebook(source, given, output, skip_done=True).skipped
    assert run_notebook(source, given, output, skip_done=True).skipped
    if change == "parameter":
        given = given | {"budget": 2}
    elif change == "notebook":
        write_notebook("P:budget = 1\nprompts = ''", "print('new')", FINAL)
    elif change == "output":
        output.write_text(output.read_text() + "\n")
    elif change == "code":
        monkeypatch.setattr("kdlab.report.done_marker.source_sha256", lambda: "other code")
    else:
        named.write_text("{ }")
    assert not run_notebook(source, given, output, skip_done=True).skipped


def execute_nothing(job, progress):
    """Stand in for the child process: mark every cell as completed and show a final record."""
    notebook = read_notebook(job.output)
    for cell in notebook.cells:
        cell.metadata["papermill"] = {"status": "completed"}
    data = {"application/vnd.kdlab.result+json": {"final": True}}
    notebook.cells[-1].outputs = [nbformat.v4.new_output("display_data", data=data)]
    nbformat.write(notebook, job.output)


FAILURES = {
    "raises": ("print('before')\nraise ValueError('no such tree')", "cell 1: ValueError: no such tree"),
    "exit 0": ("import sys\nsys.exit(0)", "cell 1"),
    "kernel killed": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "died"),
    "time-out": ("import time\ntime.sleep(600)", "cell 1: KeyboardInterrupt|time"),
    "no record": ("print('before')", "did not finish: .*(record|did not complete)"),
}


@pytest.mark.notebook
@pytest.mark.parametrize("case", FAILURES)
def test_a_run_that_does_not_finish_fails_with_a_partial_notebook(write_notebook, tmp_path, case):
    cell, message = FAILURES[case]
    child = f"import subprocess\nsubprocess.Popen(['sleep', '7{os.getpid()}'])\n"
    source, output = write_notebook(child + cell, FINAL if case != "no record" else "1"), tmp_path / "runs" / "x.ipynb"
    started = time.monotonic()
    with pytest.raises(NotebookError, match=message) as error:
        run_notebook(source, {}, output, cell_timeout_s=2 if case == "time-out" else None)
    assert time.monotonic() - started < 60
    partial = tmp_path / "runs" / "x.partial.ipynb"
    assert str(partial) in str(error.value)
    assert [path.name for path in output.parent.iterdir()] == [partial.name]
    assert child + cell in [cell.source for cell in read_notebook(partial).cells]
    assert wait_gone(f"7{os.getpid()}") == []


@pytest.mark.notebook
def test_a_failed_run_leaves_the_finished_one_and_its_marker(write_notebook, tmp_path, monkeypatch):
    monkeypatch.setattr("kdlab.report.done_marker.source_sha256", lambda: "code")
    source = write_notebook("P:budget = 1", "1 / (budget - 2)", FINAL)
    output = tmp_path / "runs" / "x.ipynb"
    run_notebook(source, {"budget": 1}, output)
    before = {path: path.read_bytes() for path in (output, marker_path(output))}
    lines = []
    with pytest.raises(NotebookError, match=r"cell 2: ZeroDivisionError.*x\.ipynb is still the earlier run"):
        run_notebook(source, {"budget": 2}, output, skip_done=True, progress=lines.append)
    assert {path: path.read_bytes() for path in before} == before
    assert (output.parent / "x.partial.ipynb").exists()
    assert any("running cell 2 of 3" in line for line in lines)  # papermill's own cell is not counted
    assert not is_done(output, run_fingerprint(source, {"budget": 2}))
    assert run_notebook(source, {"budget": 1}, output, skip_done=True).skipped


def test_what_a_run_elsewhere_writes_goes_with_it(write_notebook, tmp_path, monkeypatch):
    jobs = []
    monkeypatch.setattr("kdlab.report.placement.RUNS", tmp_path / "runs")
    def run(job, progress):
        jobs.append(job)
        execute_nothing(job, progress)

    monkeypatch.setattr("kdlab.report.runner.NotebookJob.run", run)
    monkeypatch.setattr("kdlab.report.done_marker.source_sha256", lambda: "code")
    monkeypatch.chdir(tmp_path)
    source = write_notebook("P:figures = 'figures'\nresults = 'runs'\nbudget = 1", FINAL)
    assert run_notebook(source).output == tmp_path / "runs" / "demo.ipynb"
    run_notebook(source, {"budget": 2}, "else/x.ipynb")
    run_notebook(source, {"figures": "mine"}, "else/y.ipynb")
    run_notebook(write_notebook("P:results = None", FINAL, name="other"), {}, "else/z.ipynb")
    beside = str(tmp_path / "else")
    assert [job.parameters for job in jobs] == [
        {},
        {"budget": 2, "figures": f"{beside}/figures", "results": beside},
        {"figures": "mine", "results": beside},
        {},
    ]
    assert run_notebook(source, {"budget": 2}, "else/x.ipynb", skip_done=True).skipped
    (tmp_path / "else" / "config.json").write_text("{}")
    assert run_notebook(source, {"budget": 2}, "else/x.ipynb", skip_done=True).skipped
    assert not run_notebook(source, {"budget": 3}, "else/x.ipynb", skip_done=True).skipped


@pytest.mark.notebook
def test_a_long_cell_is_not_silent(write_notebook, tmp_path, monkeypatch):
    assert notebook_job.HEARTBEAT_S <= 5
    monkeypatch.setattr(notebook_job, "HEARTBEAT_S", 0.2)
    lines = []
    run_notebook(write_notebook("import time\ntime.sleep(1.5)", FINAL), {}, tmp_path / "o.ipynb", progress=lines.append)
    assert sum("running cell 1 of 2" in line for line in lines) >= 4


@pytest.mark.notebook
def test_killed_children_and_limits_leave_nothing_running(write_notebook, tmp_path):
    child = f"import subprocess\nsubprocess.Popen(['sleep', '9{os.getpid()}'])\n"
    kill = child + "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(600)"
    with pytest.raises(NotebookError, match="SIGKILL"):
        run_notebook(write_notebook(kill, FINAL), {}, tmp_path / "killed.ipynb")
    stubborn = child + "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)"
    with pytest.raises(NotebookError, match="passed its limit of 8 s while"):
        run_notebook(write_notebook(stubborn, FINAL), {}, tmp_path / "late.ipynb", timeout_s=8)
    assert (tmp_path / "killed.partial.ipynb").exists()
    assert (tmp_path / "late.partial.ipynb").exists()
    assert wait_gone(f"9{os.getpid()}") == []


@pytest.mark.notebook
def test_a_killed_caller_takes_its_kernel_along(write_notebook, tmp_path):
    tag = f"8{os.getpid()}"
    source = write_notebook(f"import subprocess, time\nsubprocess.Popen(['sleep', '{tag}'])\ntime.sleep(600)", FINAL)
    code = f"from kdlab.report import run_notebook\nrun_notebook({str(source)!r}, None, {str(tmp_path / 'o.ipynb')!r})"
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    caller = subprocess.Popen([sys.executable, "-c", code], env=environment)
    until = time.monotonic() + 90
    while not alive(tag) and time.monotonic() < until:
        time.sleep(0.1)
    assert alive(tag)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    assert wait_gone(tag) == []
    until = time.monotonic() + 10
    while list((tmp_path / "tmp").glob("kdlab-*")) and time.monotonic() < until:
        time.sleep(0.1)
    assert not list((tmp_path / "tmp").glob("kdlab-*"))


def test_wrong_calls_are_refused_before_anything_is_touched(write_notebook, tmp_path):
    plain, output = write_notebook("print(1)"), tmp_path / "out.ipynb"
    output.write_text("an old result")
    with pytest.raises(ParameterError, match="no cell tagged 'parameters'"):
        run_notebook(plain, {"budget": 1}, output)
    with pytest.raises(ParameterError, match="unknown parameter 'bugdet'; known: budget"):
        run_notebook(write_notebook("P:budget = 1"), {"bugdet": 2}, output)
    for wrong in (plain, tmp_path / "x", tmp_path / "x.parquet"):
        with pytest.raises(ArgumentError, match=r"ends in \.ipynb and is not the notebook itself, got .*" + wrong.name):
            run_notebook(plain, {}, wrong)
    with pytest.raises(ArgumentError, match="timeout_s"):
        run_notebook(plain, {}, output, timeout_s=0)
    with pytest.raises(ArgumentError, match=r"an existing file, got none at .*absent\.ipynb \(working directory /"):
        run_notebook(tmp_path / "absent.ipynb", {}, output)
    with pytest.raises(ArgumentError, match="a folder at"):
        run_notebook(tmp_path, {}, output)
    (tmp_path / "x.parquet").write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(ArgumentError, match=r"x\.parquet, which is not a notebook"):
        run_notebook(tmp_path / "x.parquet", {}, output)
    for text in ("", "[]", "{}", json.dumps({"cells": 3, "nbformat": 4, "nbformat_minor": 5})):
        (tmp_path / "broken.ipynb").write_text(text)
        with pytest.raises(ArgumentError, match=r"broken\.ipynb"):
            run_notebook(tmp_path / "broken.ipynb", {}, output)
    assert output.read_text() == "an old result"
