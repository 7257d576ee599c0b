"""`kdlab grid`."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdlab.cli.output import print_json, print_table, say
from kdlab.errors import ArgumentError, NotebookError

if TYPE_CHECKING:
    from kdlab.report import GridRun

EXAMPLES = """
    kdlab grid notebooks/00_start_here.ipynb -p budget=7,15,31 -p "prompt=def f(x):,Once upon" --name night1
    kdlab grid notebooks/10_budget_sweep.ipynb -p budget=7,15,31 -p temperature=0,0.6 --name night2 --gpus 0,1
    kdlab grid notebooks/10_budget_sweep.ipynb --points points.csv --name night3 --workers 2 --timeout 3600
    kdlab grid notebooks/10_budget_sweep.ipynb -p target=/models/a,/models/b --name night4 --scheduler tcp://10.0.0.1:8786
"""
NOTES = """points: every combination of the -p values. Commas separate the values of a parameter; where its default is a
list, each -p is one list and further -p add others. A .csv has a header and a point a line, an empty cell is the
default; a .yaml is a list of mappings. With both, each row is combined with every -p.

places: without --workers and --gpus one process for every GPU here, or one on the CPU. Times that points measure side
by side on one CPU disturb each other.

again and again: a point is known by its parameters, the notebook, kdlab's code, the shipped data and the files and
models that parameters name. A finished one is not run again, a failed or interrupted one is; the same command goes on
after an interruption. What the last call asked for is in runs/grids/NAME/results.parquet, which
kdlab.study.load("NAME") reads; each point has its notebook, figures and tables in a folder beside it.

machines: `pip install 'kdlab[cluster]'`; clone, models and runs/ on a file system that all of them share;
`dask scheduler --host ADDRESS`, and on each machine for each GPU
  CUDA_VISIBLE_DEVICES=0 dask worker tcp://ADDRESS:8786 --nthreads 1
A scheduler runs whatever code its clients send: a private network or TLS (tls://, dask's own settings).
--slurm N asks Slurm for N such workers, a GPU each, and lets them go at the end.
"""


def add_grid(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `kdlab grid` its options."""
    parser.add_argument("notebook", metavar="NOTEBOOK")
    values = "values of one parameter; may be repeated"
    parser.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE,...", help=values)
    parser.add_argument("--points", metavar="FILE", help="a .csv or .yaml of points")
    parser.add_argument("--name", required=True, help="of the grid: its results are kdlab.study.load(NAME)")
    parser.add_argument("--folder", metavar="DIR", help="where its folder lies (default: the clone's runs/grids)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes on the CPU")
    parser.add_argument("--gpus", metavar="GPU,...", help="GPUs of this machine, one process each")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="a dask scheduler whose workers run the points")
    parser.add_argument("--slurm", type=int, metavar="JOBS", help="run the points in so many Slurm jobs")
    slurm = "an option of sbatch; may be repeated (default: --gres=gpu:1)"
    parser.add_argument("--slurm-option", action="append", metavar="OPTION", help=slurm)
    parser.add_argument("--slurm-cpus", type=int, default=16, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--slurm-memory", default="120GB", metavar="SIZE", help="(default: %(default)s)")
    parser.add_argument("--slurm-time", default="04:00:00", metavar="TIME", help="(default: %(default)s)")
    parser.add_argument("--slurm-interface", metavar="NAME", help="network interface that the jobs reach")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="limit of each point")
    parser.add_argument("--cell-timeout", type=float, metavar="SECONDS", help="limit of each cell")
    parser.add_argument("--again", action="store_true", help="run also the points that are done")
    parser.add_argument("--list", action="store_true", help="print the points and which are done, run nothing")


def run_grid_verb(arguments: argparse.Namespace) -> int:
    """Run a notebook at many points, or list them."""
    from kdlab.report import declared_parameters, read_notebook_json, run_grid
    from kdlab.report.grid_points import read_points

    path = Path(arguments.notebook)
    declared = declared_parameters(read_notebook_json(path), path.name) or {}
    points = read_points(arguments.parameter, arguments.points, declared)
    if arguments.list:
        return _list(arguments, points)
    with _scheduler(arguments) as scheduler:
        run = run_grid(
            path,
            points,
            arguments.name,
            folder=arguments.folder,
            workers=arguments.workers,
            gpus=None if arguments.gpus is None else [gpu for gpu in arguments.gpus.split(",") if gpu],
            scheduler=scheduler,
            timeout_s=arguments.timeout,
            cell_timeout_s=arguments.cell_timeout,
            again=arguments.again,
            progress=say,
        )
    _print(arguments, run)
    if run.unfinished:
        task, end = run.unfinished[0]
        left = f"{len(run.unfinished)} of {len(run.points)} points did not finish"
        raise NotebookError(f"{left}; the first is {task.output.parent}: {end.problem}")
    return 0


def _list(arguments: argparse.Namespace, points: list[dict[str, Any]]) -> int:
    from kdlab.paths import grid_folder
    from kdlab.report.grid import grid_points_done

    root = grid_folder(arguments.name, arguments.folder)
    done = grid_points_done(arguments.notebook, points, root)
    rows = [point | {"point": name, "done": is_done} for point, (name, is_done) in zip(points, done, strict=True)]
    if arguments.json:
        print_json(rows)
    else:
        print_table(rows)
    return 0


@contextlib.contextmanager
def _scheduler(arguments: argparse.Namespace) -> Iterator[Any]:
    if arguments.slurm is None:
        yield arguments.scheduler
        return
    if arguments.scheduler is not None:
        raise ArgumentError("--slurm", "either --slurm or --scheduler", "both")
    from kdlab.paths import grid_folder
    from kdlab.report.grid_slurm import slurm_cluster

    with slurm_cluster(
        arguments.slurm,
        cpus=arguments.slurm_cpus,
        memory=arguments.slurm_memory,
        walltime=arguments.slurm_time,
        interface=arguments.slurm_interface,
        directives=arguments.slurm_option or ["--gres=gpu:1"],
        logs=grid_folder(arguments.name, arguments.folder) / "slurm-logs",
    ) as cluster:
        yield cluster


def _print(arguments: argparse.Namespace, run: "GridRun") -> None:
    if arguments.json:
        points = [
            {"parameters": task.parameters, "status": end.status, "seconds": end.seconds, "skipped": end.skipped,
             "problem": end.problem, "folder": str(task.output.parent)}
            for task, end in run.points
        ]  # fmt: skip
        print_json({"name": run.name, "table": str(run.table), "points": points})
        return
    print_table([
        task.parameters | {"status": "done before" if end.skipped else end.status, "seconds": end.seconds}
        for task, end in run.points
    ])  # fmt: skip
    print(f"results: {run.table}")
