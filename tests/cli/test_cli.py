"""The command line: every verb through the shell, its JSON, its exit statuses, and errors of one line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from kdlab.cli import main
from kdlab.cli.model_verbs import parse_budgets
from kdlab.cli.output import print_table
from kdlab.errors import ArgumentError
from kdlab.report import record_tables
from tests.report.test_report import finished, save

ROOT = Path(__file__).resolve().parents[2]
FINAL = """\
import kdlab.report
kdlab.report.show_result({"final": True, "sweep": [{"rows": budget + 1, "budget": budget, "tau": 2.5}],
    "conclusion": ["a tree of 64 is best", "AR is not"]})"""
VERBS = ("doctor", "generate", "record", "sweep", "traces", "bench", "run", "grid", "report")


@pytest.fixture
def kdlab(capsys):
    """Run one command line in this process; returns (status, standard output, standard error)."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "two.jsonl"
    lines = [{"id": "a", "kind": "prose", "text": "the dog "}, {"id": "b", "kind": "sums", "text": "5+40="}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def notebook(folder, *sources, name="nb"):
    cells = [v4.new_code_cell("budget = 32  # tree nodes", metadata={"tags": ["parameters"]})]
    path = folder / f"{name}.ipynb"
    nbformat.write(v4.new_notebook(cells=cells + [v4.new_code_cell(source) for source in sources]), path)
    return path


def shell(command):
    """Run a line of bash in which `kdlab` is this kdlab."""
    line = f'kdlab() {{ "{sys.executable}" -m kdlab.cli "$@"; }}; set -o pipefail; {command}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)


def assert_one_line(error):
    assert error.startswith("kdlab: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_help_names_every_verb_every_status_and_shows_examples(kdlab):
    status, out, _ = kdlab("--help")
    assert status == 0
    for word in (*VERBS, "exit status", "130"):
        assert word in out
    for verb in VERBS:
        status, out, _ = kdlab(verb, "--help")
        assert status == 0
        assert "examples:" in out
        assert f"kdlab {verb}" in out
        assert "--json" in out
        assert "exit status" not in out
        assert ('"token_ids"' in out) == (verb in ("generate", "record"))
    assert "FOLDER/figures" in kdlab("run", "--help")[1]
    options = " ".join(kdlab("generate", "--help")[1].split())
    for words in ("float32, bfloat16 or float64", "for chain its length", "--threads N", "too small to share"):
        assert words in options
    assert kdlab("--version")[1].startswith("kdlab ")


def test_doctor_gives_a_verdict(kdlab):
    status, out, _ = kdlab("doctor", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["verdict"].startswith("ready")
    assert facts["data"] == "every file of data/README.md is whole"
    assert {"python", "torch", "cuda", "gpu", "driver", "git_commit", "memory_bytes", "optional"} <= set(facts)
    assert {"arch", "driver_cuda", "nvrtc", "cuda_headers", "nvcc", "flashmla", "kernel_cache", "kernels"} <= set(facts)
    assert all(use.keys() == {"version", "for"} for use in facts["optional"].values())
    status, out, _ = kdlab("doctor")
    assert "nh3 0." in out
    assert ": `kdlab report`\n" in out
    assert "verdict" in out


def test_record_then_sweep_equals_generate(kdlab, prompts, tmp_path):
    field = tmp_path / "deep" / "field.parquet"
    status, out, err = kdlab("record", prompts, "-o", field, "--max-new-tokens", 12, "--json")
    assert status == 0
    assert json.loads(out)["prompts"] == 2
    assert "record: 2 of 2 prompts" in err
    status, out, _ = kdlab("sweep", field, "--budgets", "0,4-5", "--json")
    assert status == 0
    rows = json.loads(out)["rows"]
    assert [row["budget"] for row in rows] == [0, 0, 4, 4, 5, 5]
    run_file = tmp_path / "run.parquet"
    status, out, _ = kdlab("generate", prompts, "--budget", 4, "--max-new-tokens", 12, "--json", "-o", run_file)
    assert status == 0
    assert run_file.exists()
    live = json.loads(out)["prompts"]
    assert [row["tokens_per_round"] for row in live] == [row["tokens_per_round"] for row in rows[2:4]]
    status, out, _ = kdlab("sweep", field)
    assert status == 0
    assert out.splitlines()[0].split()[:2] == ["budget", "num_prompts"]
    status, out, _ = kdlab("generate", "--prompt", "the dog ", "--method", "ar", "--max-new-tokens", 12)
    assert status == 0
    assert live[0]["text"] in out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "VERB"),
        (["fly"], 2, "invalid choice"),
        (["generate"], 2, "either a file of prompts or --prompt"),
        (["generate", "PROMPTS", "--prompt", "x"], 2, "got both"),
        (["generate", "absent.jsonl"], 2, "absent.jsonl"),
        (["generate", "PROMPTS", "--limit", "0"], 2, "--limit"),
        (["generate", "PROMPTS", "--method", "magic"], 2, "method"),
        (["generate", "PROMPTS", "--budget", "-1"], 2, "budget"),
        (["generate", "PROMPTS", "--budget", "x"], 2, "invalid int"),
        (["generate", "PROMPTS", "--target", "absent"], 2, "target"),
        (["generate", "PROMPTS", "--device", "cuda:99"], 2, "cuda"),
        (["generate", "PROMPTS", "--device", "tpu"], 2, "device"),
        (["generate", "PROMPTS", "--threads", "0"], 2, "--threads"),
        (["generate", "PROMPTS", "--threads", str(2**40)], 2, "--threads: expected at most 1024"),
        (["generate", "PROMPTS", "--method", "beam"], 2, "give --width N"),
        (["generate", "PROMPTS", "--width", "3"], 2, "--width: expected --method beam"),
        (["generate", "PROMPTS", "--bugdet", "3"], 2, "did you mean --budget?"),
        (["generate", "PROMPTS", "--bugdet=3"], 2, "usage: kdlab generate"),
        (["sweep", "PROMPTS", "--qqq"], 2, "unrecognized arguments: --qqq\n"),
        (["generate", "KEYLESS"], 2, "got missing ['kind']\n"),
        (["generate", "PROMPTS", "--dtype", "int3"], 2, "dtype"),
        (["sweep", "absent.parquet"], 2, "absent.parquet"),
        (["sweep", "PROMPTS"], 2, "two.jsonl"),
        (["sweep", "PROMPTS", "--budgets", "7-3"], 2, "--budgets"),
        (["run", "absent.ipynb"], 2, "absent.ipynb"),
        (["run", "absent.ipynb"], 2, f"working directory {Path.cwd()}"),
        (["run", "PROMPTS"], 2, "two.jsonl, which is not a notebook"),
        (["run", "NOTEBOOK", "-o", "x"], 2, "ends in .ipynb"),
        (["run", "NOTEBOOK", "-p", "bugdet=3"], 2, "known: budget"),
        (["run", "NOTEBOOK", "-p", "budget=3.5"], 2, "an integer"),
        (["run", "NOTEBOOK", "-o", "/proc/no/x.ipynb"], 2, "/proc/no"),
        (["report", "absent.ipynb"], 2, "absent.ipynb"),
        (["report", "NOTEBOOK"], 3, "kdlab run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_are_one_line_with_the_documented_status(kdlab, prompts, tmp_path, arguments, status, words):
    keyless = tmp_path / "keyless.jsonl"
    keyless.write_text('{"id": "a", "text": "the dog "}')
    names = {"PROMPTS": prompts, "NOTEBOOK": notebook(tmp_path, FINAL), "KEYLESS": keyless}
    got, out, error = kdlab(*(names.get(argument, argument) for argument in arguments))
    assert got == status
    assert words in error
    assert out == ""
    if "usage:" not in error:
        assert_one_line(error)


def test_sweep_above_the_recorded_candidates_names_the_switch(kdlab, prompts, tmp_path):
    field = tmp_path / "field.parquet"
    assert kdlab("record", prompts, "-o", field, "--max-new-tokens", 4, "--top-k", 3)[0] == 0
    status, _, error = kdlab("sweep", field, "--budgets", "2,7")
    assert (status, error) == (2, "kdlab: --budgets: expected at most 3, the field's top-k, or --truncated, got 7\n")
    assert kdlab("sweep", field, "--budgets", "2,7", "--truncated")[0] == 0


def test_a_chain_longer_than_the_drafter_and_the_number_of_threads_are_said(kdlab):
    words = ("generate", "--prompt", "the dog ", "--max-new-tokens", 6, "--json", "--method", "chain")
    words += ("--target", ROOT / "data/tiny-pair/target", "--drafter", ROOT / "data/tiny-pair/drafter")
    status, out, error = kdlab(*words, "--budget", 9, "--threads", 2)
    assert status == 0
    assert "chain of 7: the drafter has 7 slots\n" in error
    assert json.loads(out)["provenance"]["threads"] == 2
    status, out, error = kdlab(*words, "--budget", 7)
    assert "slots" not in error
    assert json.loads(out)["provenance"]["threads"] == 1


def test_outputs_that_cannot_be_written_fail_with_one_line(kdlab, prompts, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, error = kdlab("record", prompts, "-o", tmp_path / "file" / "x.parquet")
    assert status == 2
    assert "expected a file, got" in error.splitlines()[-1]
    status, _, error = kdlab("record", prompts, "-o", "/proc/x.parquet", "--max-new-tokens", 2, "--limit", 1)
    assert status in (1, 2)
    assert_one_line(error[error.index("kdlab: ") :])
    full = shell("kdlab doctor --json >/dev/full")
    assert full.returncode == 1
    assert_one_line(full.stderr)
    gone = shell("kdlab doctor --json | true")
    assert (gone.returncode, gone.stderr) == (1, "")


def test_budgets_are_numbers_and_ranges():
    assert parse_budgets("7") == [7]
    assert parse_budgets("0-3, 15") == [0, 1, 2, 3, 15]
    for text in ("", "1,", "a", "-1", "3-1", "1.5"):
        with pytest.raises(ArgumentError, match="--budgets"):
            parse_budgets(text)


def test_tables_are_aligned_and_found_in_records(capsys):
    print_table([{"name": "a", "n": 1.0, "x": 0.5}, {"name": "bcd", "n": 100, "x": float("nan")}])
    assert capsys.readouterr().out.splitlines() == ["name    n      x", "a       1  0.500", "bcd   100      -"]
    print_table([{"x": 0.0, "y": 1234.5678, "z": 2e6 / 3}, {"x": 2e-5, "y": 1.5, "z": 2e7 / 3}])
    assert capsys.readouterr().out.splitlines()[1:] == ["0.000  1234.568  666666.667", "2e-05     1.500   6.667e+06"]
    record = {"sweep": [{"a": 1}], "deeper": {"t": [{"b": 2}]}, "plain": [1], "none": []}
    assert dict(record_tables(record)) == {"sweep": [{"a": 1}]}


@pytest.mark.parametrize(("num_rows", "more"), [(24, ""), (30, "... and 6 rows more, which --json prints\n")])
def test_a_report_prints_the_beginning_of_long_tables_and_each_sentence_once(kdlab, tmp_path, num_rows, more):
    rows = [{"row": n} for n in range(num_rows)]
    first = save(finished(long=rows, conclusion=["said", "this"]), tmp_path, "10_first")
    second = save(finished(conclusion=["said", "that"]), tmp_path, "90_report")
    status, out, _ = kdlab("report", first, second, "-o", tmp_path / "x.html")
    assert status == 0
    assert out.startswith(f"{first}: long:\nrow\n  0\n")
    assert f"\n 23\n{more}\nsaid\nthis\nthat\nreport: " in out


@pytest.mark.notebook
def test_run_and_report(kdlab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kdlab.report.placement.RUNS", tmp_path / "runs")
    monkeypatch.setattr("kdlab.report.done_marker.source_sha256", lambda: "code")
    source = notebook(tmp_path, FINAL)
    status, out, _ = kdlab("run", source, "--list", "--json")
    assert json.loads(out) == [{"name": "budget", "default": 32, "help": "tree nodes"}]
    assert "tree nodes" in kdlab("run", source, "--list")[1]
    status, out, error = kdlab("run", source, "-p", "budget=64", "--json")
    assert status == 0
    assert json.loads(out)["record"]["sweep"][0]["budget"] == 64
    assert "running cell" in error
    assert not (tmp_path / "figures").exists()
    status, out, _ = kdlab("run", source, "-p", "budget=64")
    assert status == 0
    assert "nothing has changed" in out
    status, out, _ = kdlab("report", "runs/nb.ipynb", "--figures", "figures")
    assert status == 0
    assert "sweep:\nrows  budget    tau\n  65      64  2.500\n" in out
    lines = out.splitlines()
    assert lines.index("a tree of 64 is best") == lines.index("AR is not") - 1 > lines.index("sweep:")
    assert lines[-1] == f"report: {tmp_path / 'reports' / 'kdlab.html'}"
    status, out, _ = kdlab("report", "runs/nb.ipynb", "--json")
    assert json.loads(out)["report"] == "reports/kdlab.html"


@pytest.mark.notebook
def test_a_failing_and_an_interrupted_notebook(kdlab, tmp_path):
    status, _, error = kdlab("run", notebook(tmp_path, "1 / 0", FINAL), "-o", tmp_path / "o.ipynb")
    assert status == 3
    assert "cell 2: ZeroDivisionError" in error
    assert_one_line(error[error.index("kdlab: ") :])
    source = notebook(tmp_path, f"open({str(tmp_path / 'started')!r}, 'w')\nimport time\ntime.sleep(600)", name="slow")
    command = [sys.executable, "-m", "kdlab.cli", "run", str(source), "-o", str(tmp_path / "s.ipynb")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 90
    while not (tmp_path / "started").exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert error.splitlines()[-1] == "kdlab: interrupted"
    assert (tmp_path / "s.partial.ipynb").exists()
