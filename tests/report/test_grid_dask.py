"""Grids over dask workers on loopback: one is killed in mid-run, and which workers are refused."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import distributed
import pytest

from kdlab import study
from kdlab.errors import ArgumentError, UnsupportedDevice
from kdlab.report import grid_dask, run_grid
from kdlab.report.grid_slurm import slurm_cluster
from kdlab.report.grid_task import PointTask
from tests.report.test_grid import FINAL, PARAMETERS, budgets, grid
from tests.report.test_runner import wait_gone

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"}


@pytest.fixture
def start(tmp_path):
    """Start dask processes on loopback; they end with the test."""
    started = []

    def run(*words, **variables):
        command = [sys.executable, "-m", "distributed.cli." + words[0], *words[1:], "--no-dashboard"]
        log = (tmp_path / f"dask{len(started)}.log").open("wb")
        started.append(subprocess.Popen(command, env=ENVIRONMENT | variables, stderr=log, cwd=tmp_path))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def scheduler(start, tmp_path):
    """Return the address of a scheduler, which needs a moment to be there."""
    file = tmp_path / "scheduler.json"
    start("dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
    return str(until(lambda: file.exists() and json.loads(file.read_text())["address"]))


def worker(start, address, *words, **variables):
    options = ["--no-nanny", "--host", "127.0.0.1", *(words or ["--nthreads", "1"])]
    return start("dask_worker", address, *options, **variables)


def until(ask, seconds=180):
    end = time.monotonic() + seconds
    while not (answer := ask()) and time.monotonic() < end:
        time.sleep(0.1)
    assert answer
    return answer


@pytest.mark.notebook
def test_a_killed_worker_loses_nothing_and_nothing_runs_twice_into_a_file(start, write_notebook, tmp_path):
    log, tag = tmp_path / "log", f"5{os.getpid()}"
    write = f"""\
import os, pathlib, subprocess, time
def say(word):
    with open({str(log)!r}, 'a') as file:
        print(word, budget, file=file)
say('begin')
if budget == 2 and not pathlib.Path({str(tmp_path / "go")!r}).exists():
    worker = int(pathlib.Path(f'/proc/{{os.getppid()}}/stat').read_text().rsplit(')', 1)[1].split()[1])
    subprocess.Popen(['sleep', {tag!r}])
    pathlib.Path({str(tmp_path / "victim")!r}).write_text(f'{{worker}}.')
    time.sleep(600)"""
    source = write_notebook("P:" + PARAMETERS, write, FINAL, "say('end')")
    address = scheduler(start, tmp_path)
    workers = [worker(start, address, CUDA_VISIBLE_DEVICES=gpu) for gpu in "01"]

    def kill():
        victim = tmp_path / "victim"
        until(lambda: victim.exists() and victim.read_text().endswith("."))
        (tmp_path / "go").touch()
        os.kill(int(victim.read_text()[:-1]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    lines = []
    points = [{"budget": budget} for budget in (2, 1, 3)]
    run = run_grid(
        source, points, "night1", folder=tmp_path, scheduler=address, timeout_s=300, progress=lines.append
    )
    killer.join()
    assert run.unfinished == [], lines
    assert wait_gone(tag) == []
    said = log.read_text().splitlines()
    assert sorted(said) == ["begin 1", "begin 2", "begin 2", "begin 3", "end 1", "end 2", "end 3"]
    table = study.load("night1", folder=tmp_path)
    assert table["budget"].tolist() == [2, 1, 3]
    assert table["tau"].tolist() == [1.0, 0.5, 1.5]
    assert set(table["gpu"]) <= {"0", "1"}
    assert sum(process.poll() is None for process in workers) == 1


@pytest.fixture
def in_process():
    """Make dask clusters whose workers are threads of this process, so that stand-ins reach them."""
    with contextlib.ExitStack() as stack:
        options = {"processes": False, "dashboard_address": "127.0.0.1:0"}

        def make(workers=2, threads=1):
            cluster = distributed.LocalCluster(n_workers=workers, threads_per_worker=threads, **options)
            return stack.enter_context(cluster)

        yield make


def test_a_point_fails_an_interruption_stops_the_rest_and_the_next_call_goes_on(
    quick, in_process, write_notebook, tmp_path
):
    source, cluster = write_notebook("P:" + PARAMETERS, FINAL), in_process()

    def act(job):
        if budgets([job]) == [1]:
            return "no such tree"
        if budgets([job]) == [3]:
            until(lambda: all(any(words in line for line in lines) for words in ("budget=1: failed", "budget=2: done")))
            os.kill(os.getpid(), signal.SIGINT)
        if budgets([job]) != [2]:
            until(job.stop)
            return "the run was stopped"
        return None

    quick.act, lines = act, []
    with pytest.raises(KeyboardInterrupt):
        grid(source, tmp_path, (1, 2, 3, 4), workers=None, scheduler=cluster, progress=lines.append)
    table = study.load("night1", folder=tmp_path / "grids")
    assert table["status"].tolist() == ["failed", "done", "waiting", "waiting"]
    assert "no such tree" in table["problem"][0]
    assert len(list((tmp_path / "grids").rglob("demo.failed.json"))) == 1
    del quick.act
    quick.jobs.clear()
    run = grid(source, tmp_path, (1, 2, 3, 4), workers=None, scheduler=cluster)
    assert [end.status for _, end in run.points] == ["done"] * 4
    assert set(budgets(quick.jobs)) == {1, 3, 4}
    assert {tuple(job.environment) for job in quick.jobs} == {()}  # a worker's GPU is its own affair
    assert not list((tmp_path / "grids").rglob("demo.failed.json"))
    (stopped,) = (tmp_path / "grids" / "night1").glob(".stopped.*")  # whoever is slow to look still finds it
    os.utime(stopped, (0, 0))
    grid(source, tmp_path, (1,), workers=1)
    assert not stopped.exists()


def test_workers_that_cannot_be_right_are_refused(quick, in_process, write_notebook, tmp_path, monkeypatch):
    source = write_notebook("P:" + PARAMETERS, FINAL)

    def refused(words, cluster):
        with pytest.raises(ArgumentError, match=words):
            grid(source, tmp_path, workers=None, scheduler=cluster)
        assert quick.jobs == []

    refused("--nthreads 1, got 2 threads", in_process(1, threads=2))
    pair = in_process(2)
    monkeypatch.setattr("kdlab.report.grid_dask.seen_gpus", lambda: ["0"])
    refused("a GPU each, got GPU 0 of .* for inproc:.* and inproc:", pair)
    monkeypatch.setattr("kdlab.report.grid_dask.seen_gpus", list)
    facts = {"sees": True, "host": "a", "gpus": [], "source": "other"}
    monkeypatch.setattr("kdlab.report.grid_dask.worker_facts", lambda folder: facts)
    refused("other code on inproc:", pair)
    facts["sees"] = False
    refused("a folder that every worker sees", pair)
    monkeypatch.setattr("kdlab.report.grid_dask.worker_facts", lambda folder: 1 / 0)
    refused("can import this kdlab, got inproc:.*ZeroDivisionError", pair)


def test_a_point_that_kills_every_worker_is_recorded(tmp_path):
    class Lost:
        status, exception = "error", staticmethod(lambda: distributed.KilledWorker("x", WorkerState, 1))

    class WorkerState:
        address = "tcp://10.0.0.2:9"

    class Forgotten:
        status = "cancelled"

    task = PointTask("p", {"budget": 1}, "demo.ipynb", str(tmp_path), "s", None, None)
    assert grid_dask._end(task, Forgotten()).status == "stopped"
    assert not list(tmp_path.rglob("*.json"))
    end = grid_dask._end(task, Lost())
    assert (end.status, end.problem[:13]) == ("failed", "KilledWorker:")
    assert "KilledWorker" in json.loads((tmp_path / "p" / "demo.failed.json").read_text())["problem"]


def test_slurm_jobs_have_one_thread_one_gpu_and_their_own_options(tmp_path, monkeypatch):
    import dask.config

    monkeypatch.setattr(dask.config, "PATH", str(tmp_path / "config"))  # dask-jobqueue writes its defaults there
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat $1 >> {tmp_path}/jobs\necho Submitted batch job 7\n")
    (tmp_path / "scancel").write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/cancelled\n")
    for name in ("sbatch", "scancel"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ctrl_c = signal.getsignal(signal.SIGINT)
    options = ("--gres=gpu:h200:1", "--partition=night")
    with slurm_cluster(2, cpus=8, interface="lo", directives=options, logs=tmp_path / "logs") as cluster:
        until(lambda: (tmp_path / "jobs").exists() and (tmp_path / "jobs").read_text().count("#!") == 2)
        assert cluster.scheduler_address.startswith("tcp://127.0.0.1:")
    assert signal.getsignal(signal.SIGINT) is ctrl_c
    script = (tmp_path / "jobs").read_text()
    for words in (*options, "--nthreads 1", "--cpus-per-task=8", "--mem=112G", "-t 04:00:00"):
        assert words in script
    assert "CUDA_VISIBLE_DEVICES" not in script
    assert (tmp_path / "cancelled").read_text().split() == ["7", "7"]


def test_a_scheduler_that_is_not_there_and_missing_packages_are_said(write_notebook, tmp_path, monkeypatch):
    source = write_notebook("P:" + PARAMETERS, FINAL)
    monkeypatch.setattr("kdlab.report.grid_dask.CONNECT_S", 0.5)
    with pytest.raises(ArgumentError, match=r"answers within 0\.5 s, got tcp://127\.0\.0\.1:9"):
        run_grid(source, [{}], "n", folder=tmp_path, scheduler="tcp://127.0.0.1:9")
    for name in ("distributed", "dask_jobqueue"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedDevice, match=r"pip install 'kdlab\[cluster\]'"):
        run_grid(source, [{}], "n", folder=tmp_path, scheduler="tcp://127.0.0.1:9")
    with pytest.raises(UnsupportedDevice, match=r"pip install 'kdlab\[cluster\]'"):
        slurm_cluster(1)
