"""Grids: what runs, what is skipped, what a failure, a kill or an interruption leaves, and what is refused first."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdlab import study
from kdlab.cli import main
from kdlab.errors import ArgumentError, NotebookError
from kdlab.report import read_notebook, run_grid, run_notebook
from kdlab.report.grid_local import local_places
from kdlab.report.grid_progress import GridProgress
from kdlab.report.grid_task import PointEnd
from kdlab.report.named import find_run
from kdlab.report.output_lock import hold
from tests.report.test_runner import alive, wait_gone

PARAMETERS = "budget = 1  # tree nodes\ntemperature = 0.0\nresults = 'runs'"
# What `kdlab.report.show_result` shows, without the seconds that importing kdlab takes.
FINAL = """\
import os
from IPython.display import display
record = {'final': True, 'tau': budget / 2, 'gpu': os.environ['CUDA_VISIBLE_DEVICES'], 'best': {'budget': budget},
    'rows': [{'n': n, 'budget': n} for n in range(2)]}
display({'application/vnd.kdlab.result+json': record}, raw=True)"""


def budgets(jobs):
    return [job.parameters["budget"] for job in jobs]


def grid(source, tmp_path, values=(1, 2, 3, 4, 5, 6), **options):
    points = [{"budget": value} for value in values]
    return run_grid(source, points, "night1", folder=tmp_path / "grids", **{"workers": 1} | options)


@pytest.mark.notebook
def test_a_grid_goes_on_past_errors_and_kills_and_is_one_tidy_table(write_notebook, tmp_path, capsys):
    act = """\
import os, signal
if budget == 2:
    raise ValueError('no such tree')
if budget == 3:
    os.kill(os.getpid(), signal.SIGKILL)"""
    source = write_notebook("P:" + PARAMETERS, "x = 1", act, FINAL)
    folder = tmp_path / "grids"
    words = ["grid", str(source), "-p", "budget=2,3,1", "-p", "temperature=0.6", "--name", "night1"]
    words += ["--folder", str(folder), "--workers", "2", "--timeout", "300"]
    assert main(words) == 3
    out, error = capsys.readouterr()
    assert "2 of 3 points did not finish" in error
    assert f"results: {folder}/night1/results.parquet" in out
    assert "s left" in error
    table = study.load("night1", folder=folder)
    assert list(table.columns[:6]) == ["budget", "temperature", "point", "status", "seconds", "problem"]
    assert table["status"].tolist() == ["failed", "failed", "done"]
    assert table.loc[2, ["tau", "gpu", "best.budget"]].tolist() == [0.5, "", 1]
    assert "cell 3: ValueError: no such tree" in table["problem"][0]
    assert "died" in table["problem"][1]
    point = folder / "night1" / table["point"][0]
    facts = json.loads((point / "demo.failed.json").read_text())
    assert "raise ValueError('no such tree')" in facts["traceback"]
    assert "\x1b" not in facts["traceback"]
    assert read_notebook(point / "demo.partial.ipynb").cells[1].metadata["papermill"]["status"] == "completed"
    assert not (point / "demo.ipynb").exists()
    rows = study.load("night1", "rows", folder=folder)
    assert rows[["budget", "temperature", "n", "record.budget"]].values.tolist() == [[1, 0.6, 0, 0], [1, 0.6, 1, 1]]


def test_a_killed_point_and_those_after_it_are_all_that_runs_again(quick, write_notebook, tmp_path):
    source = write_notebook("P:" + PARAMETERS, FINAL)

    def interrupt(job):
        if budgets([job]) == [4]:
            until = time.monotonic() + 20
            while not any("budget=3: done" in line for line in lines) and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            until = time.monotonic() + 20
            while not job.stop() and time.monotonic() < until:
                time.sleep(0.01)
            return "the run was stopped"
        return None

    quick.act, lines = interrupt, []
    with pytest.raises(KeyboardInterrupt):
        grid(source, tmp_path, progress=lines.append)
    assert budgets(quick.jobs) == [1, 2, 3, 4]
    assert "goes on from there" in lines[-1]
    loaded = study.load("night1", folder=tmp_path / "grids")
    assert loaded["status"].tolist() == ["done"] * 3 + ["waiting"] * 3
    del quick.act
    quick.jobs.clear()
    run = grid(source, tmp_path, timeout_s=7.5, cell_timeout_s=3)
    assert budgets(quick.jobs) == [4, 5, 6]
    assert {(job.timeout_s, job.cell_timeout_s) for job in quick.jobs} == {(7.5, 3)}
    assert [end.skipped for _, end in run.points] == [True] * 3 + [False] * 3
    assert run.unfinished == []
    assert study.load("night1", folder=tmp_path / "grids")["status"].tolist() == ["done"] * 6
    folders = [job.output.parent for job in quick.jobs]
    assert len(set(folders)) == 3
    assert [job.parameters["results"] for job in quick.jobs] == [str(folder) for folder in folders]


@pytest.mark.parametrize("change", ["nothing", "notebook", "code", "model", "output", "again", "failed"])
def test_a_changed_point_runs_again_and_no_other(quick, write_notebook, tmp_path, monkeypatch, change):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights").write_bytes(b"1")
    source = write_notebook(f"P:{PARAMETERS}\ntarget = 'bundled'", FINAL)
    points = [{"budget": 1}, {"budget": 2, "target": str(model)}]

    def once(**options):
        quick.jobs.clear()
        run_grid(source, points, "night1", folder=tmp_path, workers=2, **options)
        return sorted(budgets(quick.jobs))

    if change == "failed":
        quick.act = lambda job: "the disk is full" if budgets([job]) == [2] else None
    assert once() == [1, 2]
    if change == "failed":
        assert len(list(tmp_path.rglob("demo.failed.json"))) == 1
        del quick.act
    elif change == "notebook":
        write_notebook(f"P:{PARAMETERS}\ntarget = 'bundled'", "print('new')", FINAL)
    elif change == "code":
        monkeypatch.setattr("kdlab.report.done_marker.source_sha256", lambda: "other code")
    elif change == "model":
        (model / "weights").write_bytes(b"12")
    elif change == "output":
        output = next((tmp_path / "night1").glob("budget-2*")) / "demo.ipynb"
        output.write_text(output.read_text() + "\n")
    expected = {"nothing": [], "model": [2], "output": [2], "failed": [2]}.get(change, [1, 2])
    assert once(again=change == "again") == expected
    assert once() == []
    assert not list(tmp_path.rglob("demo.failed.json"))


def test_the_table_holds_the_points_of_the_last_call(quick, write_notebook, tmp_path, capsys):
    source = write_notebook("P:" + PARAMETERS, FINAL)
    grid(source, tmp_path, (1, 2))
    grid(source, tmp_path, (2, 3))
    assert budgets(quick.jobs) == [1, 2, 3]
    assert study.load("night1", folder=tmp_path / "grids")["budget"].tolist() == [2, 3]
    named = find_run(str(tmp_path / "grids" / "night1"))
    assert [point.name.partition(".")[0] for point in named.points] == ["budget-2", "budget-3"]
    words = ["grid", str(source), "-p", "budget=3,4", "--name", "night1", "--folder", str(tmp_path / "grids"), "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(point["status"], point["skipped"]) for point in said["points"]] == [("done", True), ("done", False)]
    assert said["table"] == str(tmp_path / "grids" / "night1" / "results.parquet")
    with pytest.raises(ArgumentError, match="a grid of"):
        grid(write_notebook("P:" + PARAMETERS, FINAL, name="other"), tmp_path)


def test_each_gpu_has_one_process_and_the_cpu_has_none(quick, write_notebook, tmp_path, monkeypatch):
    monkeypatch.setattr("kdlab.report.grid_local.seen_gpus", lambda: ["2", "GPU-af"])
    assert list(local_places().values()) == [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "GPU-af"}]
    assert list(local_places(gpus=["GPU-af"])) == ["GPU GPU-af"]
    for wrong in (["0"], ["2", "2"], []):
        with pytest.raises(ArgumentError, match="gpus"):
            local_places(gpus=wrong)
    with pytest.raises(ArgumentError, match="both"):
        local_places(1, ["2"])
    busy, together = set(), []

    def occupy(job):
        gpu = job.environment["CUDA_VISIBLE_DEVICES"]
        together.append(gpu in busy)
        busy.add(gpu)
        time.sleep(0.05)
        busy.remove(gpu)

    quick.act = occupy
    grid(write_notebook("P:" + PARAMETERS, FINAL), tmp_path, workers=None)
    assert {job.environment["CUDA_VISIBLE_DEVICES"] for job in quick.jobs} == {"2", "GPU-af"}
    assert together == [False] * 6
    monkeypatch.setattr("kdlab.report.grid_local.seen_gpus", list)
    assert list(local_places().values()) == [{"CUDA_VISIBLE_DEVICES": ""}]
    assert len(local_places(3)) == 3


def test_only_named_gpus_are_seen(monkeypatch):
    from kdlab.config import visible_gpus

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-af,")
    assert visible_gpus() == ["3", "GPU-af"]
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert visible_gpus() == []


def test_two_runs_never_write_one_file(quick, write_notebook, tmp_path, monkeypatch):
    monkeypatch.setattr("kdlab.report.output_lock.POLL_S", 0.01)
    source, output = write_notebook("P:" + PARAMETERS, FINAL), tmp_path / "x.ipynb"
    waited = []

    def second(seconds):
        waited.append(seconds)
        raise NotebookError("held")

    def while_it_runs(job):
        with pytest.raises(NotebookError, match="held"), hold(job.output, second):
            pass

    quick.act = while_it_runs
    run_notebook(source, {}, output, skip_done=True)
    assert len(waited) == 1
    # Whoever waited for it finds it done, runs nothing and leaves nothing.
    real, answers = sys.modules["kdlab.report.runner"].is_done, [False]
    monkeypatch.setattr("kdlab.report.runner.is_done", lambda *a: answers.pop() if answers else real(*a))
    assert run_notebook(source, {}, output, skip_done=True).skipped
    assert len(quick.jobs) == 1
    assert sorted(path.name for path in tmp_path.glob("x.*")) == ["x.done.json", "x.ipynb"]
    (tmp_path / "grids" / "night1").mkdir(parents=True)
    with (
        hold(tmp_path / "grids" / "night1" / ".lock", second),
        pytest.raises(ArgumentError, match="no other process is running"),
    ):
        grid(source, tmp_path)


@pytest.mark.notebook
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_an_ended_grid_ends_its_kernels_and_the_same_command_goes_on(write_notebook, tmp_path, kind):
    log, tag = tmp_path / "log", f"6{os.getpid()}"
    slow = f"""\
import pathlib, subprocess, time
with open({str(log)!r}, 'a') as file:
    print(budget, file=file)
if not pathlib.Path({str(tmp_path / "go")!r}).exists():
    subprocess.Popen(['sleep', {tag!r}])
    time.sleep(600)"""
    source = write_notebook("P:" + PARAMETERS, slow, FINAL)
    words = [sys.executable, "-m", "kdlab.cli", "grid", str(source), "-p", "budget=2", "--name", "n"]
    words += ["--folder", str(tmp_path), "--workers", "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    caller = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 90
    while not alive(tag) and time.monotonic() < until:
        time.sleep(0.1)
    caller.send_signal(kind)
    error = caller.communicate(timeout=120)[1]
    if kind == signal.SIGINT:
        assert caller.returncode == 130
        assert "kdlab: interrupted" in error
    assert "Traceback" not in error
    assert study.load("n", folder=tmp_path)["status"].tolist() == ["waiting"]
    assert wait_gone(tag) == []
    (tmp_path / "go").touch()
    again = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert log.read_text().split() == ["2", "2"]
    assert study.load("n", folder=tmp_path)["tau"].tolist() == [1.0]


def test_the_estimate_counts_what_runs_side_by_side():
    lines: list[str] = []
    shown = GridProgress("n", {str(i): f"budget={i}" for i in range(9)}, 1, lines.append)
    shown.workers(2)
    shown(PointEnd("1", "done", 100.0, place="a"))
    # 8 points of 100 s on two workers take 400 s, of which next to none have passed.
    assert lines == [
        "n: 1 of 9 points were done before",
        "budget=1: done in 100 s on a",
        "n: 2 of 9 points, 0 s, about 400 s left",
    ]
    shown(PointEnd("2", "failed", 50.0, "no such tree", place="b"))
    assert lines[3:] == [
        "budget=2: failed in 50 s on b: no such tree",
        "n: 3 of 9 points, 1 failed, 0 s, about 300 s left",
    ]
    shown(PointEnd("3", "done", 75.0, place="c"))  # a third worker came
    assert lines[-1] == "n: 4 of 9 points, 1 failed, 0 s, about 200 s left"
    shown(None)
    assert len(lines) == 7
