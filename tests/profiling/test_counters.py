"""Hardware counters: Nsight Compute's CSV read, a stand-in for `ncu` run, and what goes wrong said in one sentence."""

import os
import sys
import time

import pytest
import torch

from kdlab.bench import read_rows
from kdlab.bench.kernels import COUNTED_SIZES, counted_command, counter_rows
from kdlab.cli import main
from kdlab.errors import ArgumentError, KdlabError, UnsupportedDevice
from kdlab.profiling import COUNTERS, Counter, collect_counters
from kdlab.profiling.counters import parse_counters

METRICS = ("gpu__time_duration.sum", "dram__bytes_read.sum", "lts__t_sectors_op_read.sum")
HEADER = ",".join(f'"{name}"' for name in ("ID", "Process ID", "Kernel Name", "Grid Size", *METRICS))
CSV = f"""==PROF== Connected to process 1
the program said "this", and
"that"
{HEADER}
"","","","","ns","byte","sector"
"0","7","attend(float *, int)","(1, 1, 1)","1,234","5.5e3","2"
"1","7","merge","(1, 1, 1)","100","n/a",""
==PROF== Disconnected from process 1
"""


def test_csv_is_read_around_what_the_program_prints():
    assert parse_counters(CSV, COUNTERS) == [
        Counter("attend", "duration", "ns", 1234.0),
        Counter("attend", "dram_read", "B", 5500.0),
        Counter("attend", "l2_read", "B", 64.0),
        Counter("merge", "duration", "ns", 100.0),
    ]
    assert parse_counters("==ERROR== nothing\n", COUNTERS) == []


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Put a program called ncu on the PATH that keeps its arguments, prints `text`, and ends with `status`."""

    def install(text, status=0, extra=""):
        (tmp_path / "text").write_text(text)
        program = tmp_path / "ncu"
        program.write_text(f'#!/bin/sh\n{extra}\necho "$@" > {tmp_path}/said\ncat {tmp_path}/text\nexit {status}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return tmp_path / "said"

    return install


def test_ncu_is_called_without_touching_the_clocks(ncu):
    said = ncu(CSV)
    assert len(collect_counters(["program", "argument"])) == 4
    line = said.read_text()
    assert "--clock-control none" in line
    assert "--profile-from-start off" in line
    assert line.strip().endswith("program argument")
    assert all(metric in line for metric, _, _ in COUNTERS.values())


@pytest.mark.parametrize(
    ("text", "status", "error", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", 1, UnsupportedDevice, "may not read the counters"),
        ("Failed to initialize the profiler: LibraryNotLoaded", 1, UnsupportedDevice, "no profiling library"),
        ("a\nlast words\n==ERROR== it failed", 3, KdlabError, "status 3: last words"),
        ("==PROF== x\n==ERROR== cannot", 2, KdlabError, "status 2: ==ERROR== cannot"),
        ("==PROF== Connected", 0, KdlabError, "launched no kernel"),
    ],
)
def test_what_goes_wrong_is_said(ncu, text, status, error, message):
    ncu(text, status)
    with pytest.raises(error, match=message):
        collect_counters(["program"])


def test_a_command_that_hangs_is_ended(ncu):
    begin = time.monotonic()
    ncu("", extra="sleep 60")
    with pytest.raises(KdlabError, match=r"longer than 0\.2 s"):
        collect_counters(["program"], timeout_s=0.2)
    assert time.monotonic() - begin < 20


def test_without_ncu_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnsupportedDevice, match="not on the PATH"):
        collect_counters(["program"])
    monkeypatch.setattr("kdlab.bench.timing.require_gpu", lambda what: None)
    assert main(["bench", "counters"]) == 2
    assert "not on the PATH" in capsys.readouterr().err


def test_the_command_prints_a_line_an_implementation_and_names_one_that_cannot_run(
    ncu, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr("kdlab.bench.timing.require_gpu", lambda what: None)
    refuse = 'case "$*" in *wgmma*) echo "for sm_90a alone"; exit 1;; esac'
    ncu(CSV, extra=refuse)
    assert main(["bench", "counters", "--out", f"{tmp_path}/rows.parquet"]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["impl", "naive", "mma"]
    assert "wgmma: hardware counters: ncu ended with status 1: for sm_90a alone" in printed.err
    assert set(read_rows(tmp_path / "rows.parquet")["impl"]) == {"naive", "mma"}
    ncu("nothing", status=1)
    assert main(["bench", "counters"]) == 1


def test_counters_become_rows_summed_over_the_kernels_of_a_call():
    counted = {"naive": parse_counters(CSV, COUNTERS), "mma": [Counter("k", "l2_read", "B", 8.0)]}
    rows = counter_rows("verify_attention", COUNTED_SIZES, counted)
    values = {(row["impl"], row["metric"]): (row["value"], row["unit"], row["note"]) for _, row in rows.iterrows()}
    assert values == {
        ("naive", "duration"): (1334.0, "ns", "attend, merge"),
        ("naive", "dram_read"): (5500.0, "B", "attend, merge"),
        ("naive", "l2_read"): (64.0, "B", "attend, merge"),
        ("mma", "l2_read"): (8.0, "B", "k"),
    }
    assert rows["context"].tolist() == [4096] * 4


def test_the_command_runs_one_arm_of_one_case():
    command = counted_command("verify_attention", "naive", COUNTED_SIZES)
    assert command[0] == sys.executable
    assert command[-3:-1] == ["verify_attention", "naive"]


@pytest.mark.gpu
def test_the_marked_arm_runs_and_others_are_refused():
    from kdlab.bench.kernels.counted import run_once

    run_once("verify_attention", "naive", COUNTED_SIZES | {"prefix": 256})
    with pytest.raises(ArgumentError, match="arm"):
        run_once("verify_attention", "nobody", COUNTED_SIZES)
    with pytest.raises(ArgumentError, match="sizes"):
        run_once("verify_attention", "naive", {"rows": 1})
    assert torch.cuda.is_available()
