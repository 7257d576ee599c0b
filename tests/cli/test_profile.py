"""`kdlab profile`: what it prints and saves, and what is left where a tool, a permission or a GPU is missing."""

import json
import sys

import pytest

from kdlab.bench import (
    profiled,  # noqa: F401  it keeps the real `require_gpu`: only counting is let through
    timing,
)
from kdlab.cli import main
from kdlab.errors import ArgumentError
from kdlab.profiling import load_nsight, profile_rounds, write_launches
from tests.profiling import ncu_program
from tests.profiling.samples import launches
from tests.profiling.test_ranges import Domain


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Let a GPU be there as far as counting goes, and put a stand-in for ncu on the PATH."""
    monkeypatch.setattr(timing, "require_gpu", lambda what: None)
    program = tmp_path / "ncu"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ncu_program.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return program


def test_counted_stages_are_printed_and_saved(ncu, tmp_path, capsys):
    path = tmp_path / "nsight.parquet"
    assert main(["profile", "round", "--model", "bundled", "--only", "counters", "--out", str(path)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[1:3] == ["mini", "mode   stage              launches  us  share  alone_us  GB_s  tensor_pct"]
    assert lines[3].split() == ["eager", "attention", "1", "2.5", "2000", "12.5"]
    assert "mini, prefill of 9 tokens" in out
    found = load_nsight(path)
    assert found["case"].tolist() == ["mini", "mini", "mini, prefill of 9 tokens"]
    assert found["gpu"].tolist() == ["NVIDIA H200"] * 3


def test_what_the_file_has_of_the_other_subject_stays(ncu, tmp_path, monkeypatch, capsys):
    path = tmp_path / "nsight.parquet"
    monkeypatch.setattr("kdlab.profiling.launches.gpu_facts", lambda: {"gpu_uuid": "GPU-1"})
    write_launches(launches(subject="kernels"), path)
    command = ["profile", "round", "--model", "bundled", "--only", "counters", "--out", str(path)]
    for _ in range(2):
        assert main(command) == 0
        assert load_nsight(path)["subject"].value_counts().to_dict() == {"kernels": 7, "round": 3}
    monkeypatch.setattr("kdlab.profiling.launches.gpu_facts", lambda: {"gpu_uuid": "GPU-2"})
    assert main(command) == 2
    assert "holds launches of the GPU GPU-1, and this is GPU-2" in capsys.readouterr().err


def test_where_counting_is_forbidden_the_timeline_is_left(ncu, tmp_path, capsys):
    ncu.write_text("#!/bin/sh\necho ==ERROR== ERR_NVGPUCTRPERM\nexit 1\n")
    assert main(["profile", "round", "--model", "tiny", "--repeats", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "counters of tiny: hardware counters: this user may not read the counters" in err
    assert "timeline: no GPU here; these are the CPU's times" in err
    found = json.loads(out)
    assert {"attention", "experts", "accept", "commit"} <= {row["stage"] for row in found["rows"]}
    assert all(row["alone_us"] is None for row in found["rows"])
    assert len(found["rounds"]) == 2


def test_what_needs_a_gpu_says_so_and_nothing_at_all_is_a_failure(capsys):
    assert main(["profile", "round", "--model", "k2.6"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[:2] == [
        "timeline of k2.6: a round of k2.6: needs a CUDA GPU, and torch finds none on this machine",
        "counters of k2.6: hardware counters: needs a CUDA GPU, and torch finds none on this machine",
    ]
    assert err[-1] == "nothing could be profiled"
    assert main(["profile", "kernels"]) == 1
    assert "timeline of the kernels: kernels: needs a CUDA GPU" in capsys.readouterr().err


def test_without_time_everything_is_left_out_and_it_is_said(capsys):
    assert main(["profile", "round", "--model", "tiny", "--seconds", "1e-9"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err == ["timeline of tiny: left out, out of time", "counters of tiny: left out, out of time",
                   "nothing could be profiled"]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [(["round", "--seconds", "0"], "seconds: expected"),
     (["round", "--model", "tiny", "--rows", "1"], "rows: expected"),
     (["round", "--layers", "0"], "layers: expected at least 1, got 0"),
     (["round", "--model", "nothing"], "nothing"), (["kernels", "--heads", "x"], "invalid"), ([], "SUBJECT")],
)  # fmt: skip
def test_bad_words_are_refused(words, message, capsys):
    assert main(["profile", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("models", ["tiny", ()])
def test_models_are_a_list(models):
    with pytest.raises(ArgumentError, match="models: expected a list or tuple of at least one name"):
        profile_rounds(models)


def test_generate_pushes_ranges_for_other_profilers(monkeypatch, capsys):
    domain, module = Domain(), type(sys)("nvtx")
    module.get_domain = lambda name: domain
    monkeypatch.setitem(sys.modules, "nvtx", module)
    words = ["generate", "--prompt", "x", "--target", "tiny", "--max-new-tokens", "4", "--budget", "3"]
    assert main([*words, "--nvtx"]) == 0
    assert {"round", "prefill", "experts", "commit"} <= set(domain.log)
    assert domain.log.count("pop") * 2 == len(domain.log)
    domain.log.clear()
    assert main(words) == 0
    assert domain.log == []
