"""`kdlab bench kernels`: what it prints of a run, as text and as JSON, and what it saves; the run itself is made up."""

import json

import pytest

from kdlab.bench import kernels as kernel_bench
from kdlab.bench import read_rows
from kdlab.bench.full_width import suite
from kdlab.cli import bench_round as verb
from kdlab.cli import main
from tests.bench.samples import kernel_rows


@pytest.fixture
def ran(monkeypatch):
    """Replace the benchmark by one that keeps its arguments and finds the sample rows."""
    given = {}

    def bench_kernels(**options):
        given.update(options)
        options["progress"](3, 3)
        return kernel_bench.KernelBench(kernel_rows(), ("short run: 1 of 2 cases; --seconds 300 has all",))

    monkeypatch.setattr(kernel_bench, "bench_kernels", bench_kernels)
    return given


def test_one_table_the_ceilings_the_verdicts_and_what_was_cut(ran, capsys, tmp_path):
    assert main(["bench", "kernels", "--out", f"{tmp_path}/rows.parquet"]) == 0
    assert ran.keys() == {"seconds", "progress"}
    assert ran["seconds"] == 25.0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    names = "op case impl mode us p10 p90 warm_us eager_us floor_us roofline goal_us goal"
    assert lines[0].split() == names.split()
    (line,) = [line for line in lines if "prefix=4096 H=64" in line and line.split()[5] == "wgmma" and "%" in line]
    assert line.split()[-8:] == ["40.80", "38.00", "70.00", "24.00", "60.0", "%", "37.50", "missed"]
    assert "mma.sync: 600.00 TFLOP/s (instructions)" in lines
    assert "7 of 8 goals met" in lines
    assert lines[-1].startswith("short run")
    assert "bench kernels: 3 of 3 cases" in err
    assert len(read_rows(tmp_path / "rows.parquet")) == len(kernel_rows())


def test_a_fault_of_the_device_is_said_and_what_was_timed_is_saved(monkeypatch, capsys, tmp_path):
    found = kernel_bench.KernelBench(kernel_rows(), (), "case 3 of 9, moe_int4: an illegal memory access")
    monkeypatch.setattr(kernel_bench, "bench_kernels", lambda **options: found)
    assert main(["bench", "kernels", "--out", f"{tmp_path}/rows.parquet"]) == 1
    assert "the device failed at case 3 of 9, moe_int4: an illegal memory access" in capsys.readouterr().err
    assert (tmp_path / "rows.parquet").exists()
    assert main(["bench", "kernels", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fault"] == found.fault


def test_json_has_the_same_and_null_for_what_is_not_known(ran, capsys):
    assert main(["bench", "kernels", "--json", "--seconds", "9", "--ops", "moe_int4,tree_build", "--heads", "8"]) == 0
    assert (ran["seconds"], ran["ops"], ran["heads"]) == (9.0, ["moe_int4", "tree_build"], [8])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"ceilings", "rows", "verdicts", "messages", "fault"}
    assert {ceiling["of"] for ceiling in found["ceilings"]} == {"copy", "read", "matrix", "mma.sync", "launch"}
    (host, *_) = [row for row in found["rows"] if row["impl"] == "host heap"]
    assert (host["mode"], host["goal_us"], host["verdict"], host["prefix"]) == ("eager", None, None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--ops", "sort"], "ops: expected one of"), (["--heads", "7"], "heads: expected one of"),
     (["--heads", "x"], "invalid"), (["--seconds", "-1"], "seconds: expected"),
     (["--out", "/"], "expected a file, got '/', a folder"), (["--out", ""], "expected a file"),
     (["--out", "/dev/null/x.parquet"], "expected a file, got '/dev/null/x.parquet', but '/dev/null' is no folder")],
)  # fmt: skip
def test_bad_words_are_refused(words, message, capsys):
    assert main(["bench", "kernels", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_there_is_nothing_to_count(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "counters"]) == 2
    assert "hardware counters: needs a CUDA GPU" in capsys.readouterr().err


def test_rows_of_another_benchmark_are_no_rounds(ran, tmp_path, capsys):
    assert main(["bench", "kernels", "--out", f"{tmp_path}/rows.parquet"]) == 0
    for option, benchmark in (("--read", "round"), ("--collectives", "collectives")):
        assert main(["bench", "round", option, f"{tmp_path}/rows.parquet"]) == 2
        assert f"{option}: expected rows of `kdlab bench {benchmark}`, got rows of" in capsys.readouterr().err


def test_rows_so_far_stand_beside_an_older_file_until_the_run_has_ended(monkeypatch, tmp_path, capsys):
    out, part = tmp_path / "rounds.parquet", tmp_path / "rounds.part.parquet"
    out.write_text("an older run")

    def bench_round(*, keep, **_):
        keep(kernel_rows()[:1])
        assert out.read_text() == "an older run"
        assert len(read_rows(part)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "bench_round", bench_round)
    main(["bench", "round", "--out", str(out)])
    assert out.read_text() == "an older run"
    assert part.exists()

    monkeypatch.setattr(suite, "bench_round", lambda **_: suite.RoundBench(kernel_rows(), ()))
    monkeypatch.setattr(verb, "_tell", lambda *_: 0)
    assert main(["bench", "round", "--out", str(out)]) == 0
    assert len(read_rows(out)) == len(kernel_rows())
    assert not part.exists()
