"""Slurm jobs as the workers of a grid, through dask-jobqueue: one GPU and one point at a time in each job."""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError, UnsupportedDevice


def slurm_cluster(
    jobs: int,
    *,
    cpus: int = 16,
    memory: str = "120GB",
    walltime: str = "04:00:00",
    interface: str | None = None,
    directives: Sequence[str] = ("--gres=gpu:1",),
    logs: str | Path = "slurm-logs",
) -> Any:
    """Ask Slurm for `jobs` jobs that each run one dask worker; give the cluster to `run_grid` as its scheduler.

    Slurm gives each job its GPU, so CUDA_VISIBLE_DEVICES is left as it is. The scheduler runs in this process and
    listens on `interface`: it runs whatever code its clients send, so choose a private network.

    Args:
        jobs: how many; points begin when the first one runs.
        cpus: cores of a job.
        memory: of a job.
        walltime: of a job, as sbatch takes it; a point whose job ends goes to another one.
        interface: network interface that the jobs reach, `ib0` for example; None leaves it to dask.
        directives: further options of sbatch.
        logs: folder of the jobs' output.

    Returns:
        A `dask_jobqueue.SLURMCluster`, to be closed by `close()` or a `with`.

    Raises:
        UnsupportedDevice: dask-jobqueue is not installed.
        ArgumentError: `jobs` or `cpus` is below 1.
    """
    for name, value in {"jobs": jobs, "cpus": cpus}.items():
        if type(value) is not int or value < 1:
            raise ArgumentError(name, "a whole number of at least 1", repr(value))
    try:
        with _ctrl_c_kept():
            from dask_jobqueue import SLURMCluster
    except ImportError as error:
        raise UnsupportedDevice(f"a grid on Slurm needs `pip install 'kdlab[cluster]'` ({error})") from error
    # `cores` are dask's threads, and a worker runs one point; `job_cpu` are the cores that Slurm is asked for.
    cluster = SLURMCluster(
        cores=1,
        processes=1,
        job_cpu=cpus,
        memory=memory,
        walltime=walltime,
        interface=interface,
        job_extra_directives=list(directives),
        log_directory=str(logs),
        scheduler_options={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
    )
    cluster.scale(jobs=jobs)
    return cluster


@contextlib.contextmanager
def _ctrl_c_kept() -> Iterator[None]:
    """Undo what importing dask-jobqueue does to Ctrl-C: it would exit with status 0, whatever is unfinished."""
    kept = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is not kept:
            signal.signal(signal.SIGINT, kept)
