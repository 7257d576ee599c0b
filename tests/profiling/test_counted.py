"""Launches counted under Nsight Compute: its CSV with ranges read into rows, and the child that marks them."""

import contextlib
import json
import sys
import time

import pytest
import torch

from kdlab.errors import KdlabError
from kdlab.kernels.stage import span, stage
from kdlab.profiling import count_launches, run_marked
from kdlab.profiling.counted import launch_rows
from kdlab.profiling.ncu import read_csv
from tests.profiling import ncu_program
from tests.profiling.samples import Piece


def test_lines_become_launches_with_case_stage_and_layer():
    works = [(ncu_program.WORK, 0), (ncu_program.WORK, 1)]
    rows, subjects = zip(*launch_rows(read_csv(ncu_program.page(ncu_program.LAUNCHES)), works), strict=True)
    assert subjects == (0, 0, 1)
    places = [(row["kernel"], row["stage"], row.get("layer"), row.get("phase"), row["position"]) for row in rows]
    assert places == [
        ("attend", "attention", 1, None, 0),
        ("merge", "", None, None, 1),
        ("embed", "embedding", None, "prefill", 0),
    ]
    first = rows[0]
    assert (first["duration_us"], first["dram_read"], first["dram_write"]) == (2.5, 4e6, 1e6)
    assert (first["l2_read"], first["tensor_pct"], first["sm_pct"], first["dram_pct"]) == (4e6, 12.5, 40.25, 81.5)
    assert (first["tensor_flops"], first["registers"]) == (None, 168)
    assert (first["grid"], first["block"], first["rows"]) == ("264, 1, 1", "128, 1, 1", 33)


def test_launches_of_other_domains_and_outside_of_cases_are_left_out():
    page = ncu_program.page([("mine", ["profiled", "case 0"]), ("nobodys", []), ("outside", ["attention"])])
    foreign = '""<default domain>:case 0:none:none:RGB:0xff:REGISTERED:case 0""'
    assert 'nobodys","7  ' in page
    page = page.replace('nobodys","7  ', f'nobodys","7  {foreign}').replace('7  ""kdlab', f'7  {foreign}  ""kdlab')
    assert [row["kernel"] for row, _ in launch_rows(read_csv(page), [(ncu_program.WORK, 0)])] == ["mine"]


def test_a_child_that_had_no_time_says_what_was_left_out(ncu, tmp_path):
    facts = tmp_path / "facts.json"
    ncu_program.leave(facts, [], ["out of time: left out from mini"])
    (tmp_path / "ncu").write_text("#!/bin/sh\necho ==PROF== Connected\n")
    launches, messages = count_launches(["program"], facts, seconds=5.0)
    assert launches.empty
    assert messages == ["counters: out of time: left out from mini"]


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Put the stand-in on the PATH under the name ncu, with a folder for what it was told."""
    program = tmp_path / "ncu"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\nexec {sys.executable} {ncu_program.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "said"


def test_the_child_runs_under_ncu_filtered_by_our_domain(ncu, tmp_path):
    facts = tmp_path / "facts.json"
    launches, messages = count_launches(["program", json.dumps({"facts": str(facts)})], facts, seconds=5.0)
    assert messages == []
    assert launches["case"].tolist() == ["mini", "mini", "mini, prefill of 9 tokens"]
    assert launches["phase"].tolist() == ["verify", "other", "prefill"]
    assert launches["run_id"].tolist() == ["a", "a", "b"]
    assert set(launches["source"]) == {"ncu"}
    assert launches["sm_clock_mhz_before"].tolist() == [1980.0] * 3
    assert "--nvtx --nvtx-include kdlab@profiled/ program" in ncu.read_text()
    assert "--clock-control none" in ncu.read_text()


def test_a_child_that_marks_nothing_is_an_error(ncu, tmp_path, monkeypatch):
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\necho ==PROF== Connected\n")
    with pytest.raises(KdlabError, match="no kernel inside a range of the NVTX domain 'kdlab'"):
        count_launches(["program"], tmp_path / "facts.json", seconds=5.0)


class Watched:
    """Ranges and the profiler's switch, written down in order."""

    def __init__(self, monkeypatch):
        self.log = []
        monkeypatch.setattr("kdlab.profiling.counted.NvtxRanges", lambda: self.range)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        for name in ("start", "stop"):
            monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: self.log.append(name))

    @contextlib.contextmanager
    def range(self, name):
        self.log.append(name)
        yield
        self.log.append(f"/{name}")


class Profiled:
    """Pieces of work with a provenance."""

    def __init__(self, run_id, works):
        self.works, self.provenance = works, {"run_id": run_id}


def round_of(log):
    def run():
        with span("round"), span("layer", 3):
            for name in ("attention", "o_proj"):
                with stage(name):
                    log.append("launch")

    return run


def test_work_is_marked_by_case_and_stage_after_a_warm_up(tmp_path, monkeypatch):
    watched = Watched(monkeypatch)
    subjects = [Profiled(name, [Piece(f"{name}1", round_of(watched.log)), Piece(f"{name}2", round_of(watched.log))])
                for name in "ab"]  # fmt: skip
    run_marked(subjects, tmp_path / "facts", layers=False, until=time.time() + 60)
    counted = " ".join(watched.log).split("start")[1].split()
    assert counted[:9] == ["profiled", "case", "0", "round", "attention", "launch", "/attention", "o_proj", "launch"]
    facts = json.loads((tmp_path / "facts").read_text())
    assert [(work["case"], subject) for work, subject in facts["works"]] == [("a1", 0), ("b1", 1), ("a2", 0), ("b2", 1)]
    assert (facts["messages"], facts["provenance"]) == ([], [{"run_id": "a"}, {"run_id": "b"}])
    watched.log.clear()
    run_marked(subjects, tmp_path / "facts", layers=True, until=time.time() + 60)
    assert "layer 3" in watched.log


def test_work_that_is_late_is_cut_at_a_stage_and_what_follows_is_left_out(tmp_path, monkeypatch):
    watched = Watched(monkeypatch)
    times = iter([0.0, 0.0, 0.0, 9.0])
    monkeypatch.setattr("kdlab.profiling.counted.time.time", lambda: next(times))
    subjects = [Profiled("run", [Piece("a", round_of(watched.log)), Piece("b", round_of(watched.log))])]
    run_marked(subjects, tmp_path / "facts", layers=False, until=5.0)
    assert " ".join(watched.log).endswith("/attention stop o_proj launch /o_proj /round /case 0 /profiled stop")
    facts = json.loads((tmp_path / "facts").read_text())
    assert [work["case"] for work, _ in facts["works"]] == ["a"]
    assert facts["messages"] == ["out of time: a is cut off from its stage 'o_proj'"]
    monkeypatch.setattr("kdlab.profiling.counted.time.time", lambda: 9.0)
    run_marked(subjects, tmp_path / "facts", layers=False, until=5.0)
    assert json.loads((tmp_path / "facts").read_text())["messages"] == ["out of time: left out from a"]
