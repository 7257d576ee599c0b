"""Grids against what goes wrong around them: full disks, broken files, edits while they run, text that is no text."""

import errno
import json

import pytest

from kdlab import study
from kdlab.cli import main
from kdlab.errors import ArgumentError, ParameterError
from kdlab.report import read_notebook, run_grid, run_notebook
from kdlab.report.named import PLAN
from tests.report.test_grid import FINAL, PARAMETERS, budgets, grid


def test_a_notebook_that_is_edited_while_it_runs_counts_as_what_ran(quick, write_notebook, tmp_path):
    old, new = ("P:" + PARAMETERS, "print('old')", FINAL), ("P:" + PARAMETERS, "print('new')", FINAL)
    source, ran = write_notebook(*old), []

    def edit(job):
        ran.append(read_notebook(job.output).cells[1].source)
        write_notebook(*new)

    quick.act = edit
    assert [end.skipped for _, end in grid(source, tmp_path, (1,)).points] == [False]
    assert ran == ["print('old')"]
    del quick.act
    assert [end.skipped for _, end in grid(source, tmp_path, (1,)).points] == [False]  # the new one never ran
    assert [end.skipped for _, end in grid(source, tmp_path, (1,)).points] == [True]


def test_the_table_is_there_from_the_beginning_and_grows(quick, write_notebook, tmp_path, monkeypatch):
    monkeypatch.setattr("kdlab.report.grid.SAVE_EVERY_S", -1.0)
    seen = []
    quick.act = lambda job: seen.append(study.load("night1", folder=tmp_path / "grids")["status"].tolist())
    grid(write_notebook("P:" + PARAMETERS, FINAL), tmp_path, (1, 2))
    assert seen[0] == ["waiting", "waiting"]
    assert study.load("night1", folder=tmp_path / "grids")["status"].tolist() == ["done", "done"]


def test_a_full_disk_ends_no_point_and_the_next_call_collects_them(quick, write_notebook, tmp_path, monkeypatch):
    monkeypatch.setattr("kdlab.report.grid.SAVE_EVERY_S", -1.0)
    calls, lines = [], []

    def write_table(*arguments):
        calls.append(arguments)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    source = write_notebook("P:" + PARAMETERS, FINAL)
    with monkeypatch.context() as patch:
        patch.setattr("kdlab.report.grid_results.write_table", write_table)
        with pytest.raises(OSError, match=r"No space left on device; what is done is kept.*results\.parquet"):
            grid(source, tmp_path, (1, 2, 3), progress=lines.append)
    assert sum("the table could not be written now" in line for line in lines) == 3
    grid(source, tmp_path, (1, 2, 3))
    assert budgets(quick.jobs) == [1, 2, 3]
    assert study.load("night1", folder=tmp_path / "grids")["status"].tolist() == ["done"] * 3


def test_a_point_whose_disk_is_full_fails_and_the_rest_go_on(quick, write_notebook, tmp_path):
    def full(job):
        if budgets([job]) == [1]:
            raise OSError(errno.ENOSPC, "No space left on device")

    quick.act = full
    run = grid(write_notebook("P:" + PARAMETERS, FINAL), tmp_path, (1, 2))
    assert [end.status for _, end in run.points] == ["failed", "done"]
    table = study.load("night1", folder=tmp_path / "grids")
    assert "No space left on device" in table["problem"][0]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_thread_that_dies_is_a_failed_point_and_no_endless_wait(quick, write_notebook, tmp_path, error):
    def die(job):
        if budgets([job]) == [1]:
            raise error

    quick.act = die
    run = grid(write_notebook("P:" + PARAMETERS, FINAL), tmp_path, (1, 2))
    assert [end.status for _, end in run.points] == ["failed", "done"]
    assert type(error).__name__ in run.points[0][1].problem


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_a_broken_plan_is_named(quick, write_notebook, tmp_path, text):
    source = write_notebook("P:" + PARAMETERS, FINAL)
    grid(source, tmp_path, (1,))
    (tmp_path / "grids" / "night1" / PLAN).write_text(text)
    with pytest.raises(ArgumentError, match=r"grid\.json, which is broken"):
        grid(source, tmp_path, (1,))


def test_odd_text_is_a_line_in_what_is_printed_and_itself_in_the_table(quick, write_notebook, tmp_path, capsys):
    source = write_notebook("P:text = 'x'\nresults = 'runs'", FINAL)
    texts = ["line\nbreak", "\x1b[31mred", "日本 ñ 🙂", "it's, \"so\"", " "]
    (tmp_path / "points.json").write_text(json.dumps([{"text": text} for text in texts]))
    words = ["grid", str(source), "--points", str(tmp_path / "points.json"), "--name", "n", "--workers", "1"]
    assert main([*words, "--folder", str(tmp_path)]) == 0
    out, error = capsys.readouterr()
    assert "\x1b" not in out + error
    assert len(out.splitlines()) == 1 + len(texts) + 1
    assert r"line\nbreak" in out
    assert study.load("n", folder=tmp_path)["text"].tolist() == texts
    assert len({job.output.parent for job in quick.jobs}) == len(texts)


def test_text_that_no_file_holds_is_refused_before_anything_runs(quick, write_notebook, tmp_path, capsys):
    source = write_notebook("P:text = 'x'\nany_of = None", FINAL)
    for point in ({"text": "bad\udcff"}, {"any_of": ["\ud83d"]}):
        with pytest.raises(ParameterError, match="expected text that UTF-8 can hold"):
            run_grid(source, [point], "n", folder=tmp_path, workers=1)
    assert main(["grid", str(source), "-p", "text=\udcff", "--name", "n", "--folder", str(tmp_path)]) == 2
    assert "UTF-8" in capsys.readouterr().err
    assert quick.jobs == []


@pytest.mark.parametrize("limit", [float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("name", ["timeout_s", "cell_timeout_s"])
def test_a_limit_that_is_no_time_is_refused(quick, write_notebook, tmp_path, name, limit):
    source = write_notebook("P:" + PARAMETERS, FINAL)
    with pytest.raises(ArgumentError, match=name):
        grid(source, tmp_path, **{name: limit})
    with pytest.raises(ArgumentError, match=name):
        run_notebook(source, {}, tmp_path / "o.ipynb", **{name: limit})
