"""The points of a grid: products, files, and what is refused before anything runs."""

import json

import pytest

from kdlab.cli import main
from tests.report.test_grid import FINAL, PARAMETERS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-p", "bugdet=3"], "unknown parameter 'bugdet'; known: budget"),
        (["-p", "budget=7,x"], "budget: expected an integer, got 'x'"),
        (["-p", "budget=7,7"], "the value 7 is given twice"),
        (["-p", "budget=7", "-p", "budget=7"], "the value 7 is given twice"),
        (["-p", "budget"], "expected name=value"),
        (["-p", "budget=1,2", "-p", "results=all"], "results: expected another folder for each point"),
        (["--name", "../x"], "name: expected letters"),
        (["--points", "bad.csv"], "line 3: budget: expected an integer, got 'x'"),
        (["--points", "unknown.csv"], "unknown parameter 'bugdet'"),
        (["--points", "long.csv"], "2 cells a line, got another number in line 2"),
        (["--points", "twice.csv"], "point 2 is the same as point 1: budget=7"),
        (["--points", "twice.csv", "-p", "budget=3"], "given both by"),
        (["--points", "empty.csv"], "at least one point"),
        (["--points", "bad.yaml"], "a list of mappings"),
        (["--points", "broken.yaml"], "YAML"),
        (["--points", "broken.json"], "JSON"),
        (["--points", "latin.csv"], "comma-separated values in UTF-8"),
        (["--points", "latin.yaml"], "YAML"),
        (["--points", "unknown.yaml"], "unknown parameter 'bugdet'"),
        (["--points", "points.txt"], ".csv, .yaml"),
        (["--points", "absent.csv"], "absent.csv"),
        (["--workers", "0"], "workers: expected a whole number"),
        (["--gpus", "99"], "gpus: expected each one of"),
        (["--timeout", "0"], "timeout_s"),
        (["--scheduler", "tcp://127.0.0.1:1", "--workers", "1"], "either a scheduler"),
        (["--scheduler", "tcp://127.0.0.1:1", "--slurm", "1"], "either --slurm or --scheduler"),
        (["--slurm", "0"], "jobs: expected a whole number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_wrong_is_refused_before_anything_runs(
    quick, write_notebook, tmp_path, monkeypatch, capsys, options, words
):
    texts = {
        "bad.csv": "budget\n7\nx\n",
        "unknown.csv": "budget,bugdet\n7,\n",
        "long.csv": "budget,temperature\n7,0,1\n",
        "twice.csv": "budget\n7\n7\n",
        "empty.csv": "budget\n",
        "bad.yaml": "budget: 7",
        "broken.yaml": "- {",
        "broken.json": "[",
        "latin.csv": "budget\n\udce9\n",
        "latin.yaml": "- {budget: \udce9}",
        "unknown.yaml": "- {bugdet: 7}",
        "points.txt": "budget\n7\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    monkeypatch.chdir(tmp_path)
    source = write_notebook("P:" + PARAMETERS, FINAL)
    assert main(["grid", str(source), "--name", "night1", "--folder", str(tmp_path / "grids"), *options]) == 2
    out, error = capsys.readouterr()
    assert words in error
    assert (error.count("\n"), out, quick.jobs) == (1, "", [])
    assert not (tmp_path / "grids").exists() or not list((tmp_path / "grids").rglob("*.ipynb"))


def test_points_come_as_products_and_from_files(quick, write_notebook, tmp_path, capsys):
    source = write_notebook("P:budgets = [7]\ntext = 'a'\ntemperature = 0.0\nwidth = None", FINAL)

    def points(*options):
        assert main(["grid", str(source), "--name", "n", "--folder", str(tmp_path), "--list", "--json", *options]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert len({row.pop("point") for row in rows}) == len(rows)
        return [{name: value for name, value in row.items() if name != "done"} for row in rows]

    assert points() == [{}]
    assert points("-p", "temperature=0, 0.6", "-p", "text='a, b',c") == [
        {"temperature": 0.0, "text": "a, b"},
        {"temperature": 0.0, "text": "c"},
        {"temperature": 0.6, "text": "a, b"},
        {"temperature": 0.6, "text": "c"},
    ]
    assert points("-p", "budgets=7,15", "-p", "budgets=31") == [{"budgets": [7, 15]}, {"budgets": [31]}]
    assert points("-p", "width=none,3,[1,2]") == [{"width": None}, {"width": 3}, {"width": [1, 2]}]
    (tmp_path / "p.csv").write_text('text,temperature\n"x, y",0.5\nz,\n')
    assert points("--points", str(tmp_path / "p.csv"), "-p", "width=1,2") == [
        {"text": "x, y", "temperature": 0.5, "width": 1},
        {"text": "x, y", "temperature": 0.5, "width": 2},
        {"text": "z", "width": 1},
        {"text": "z", "width": 2},
    ]
    (tmp_path / "p.yaml").write_text("- {text: x, budgets: [1, 2]}\n- {temperature: 1}\n")
    assert points("--points", str(tmp_path / "p.yaml")) == [{"text": "x", "budgets": [1, 2]}, {"temperature": 1}]
    assert quick.jobs == []
