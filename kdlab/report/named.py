"""A named run: the executed notebooks below one folder of `runs/`, a point a folder, and whether all finished."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError, NotebookError
from kdlab.report.done_marker import marker_problem
from kdlab.report.notebook_file import read_notebook_json
from kdlab.report.outcome import PARTIAL_SUFFIX, last_problem
from kdlab.report.placement import FOLDERS, RUNS

PLAN = "grid.json"
"""Lists the points of a grid under `points`, each with the `id` that is its folder's name."""


@dataclass(frozen=True, slots=True)
class Point:
    """Executed notebooks of one folder.

    Attributes:
        name: the folder below the run's, empty for the run's own.
        folder: where they and their tables lie.
        notebooks: in the order of their names.
        parameters: by notebook, what was given; folders that only say where files go are left out.
    """

    name: str
    folder: Path
    notebooks: tuple[Path, ...]
    parameters: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A named run: its points in the order of their names, and what did not finish, by place and reason."""

    name: str
    folder: Path
    points: tuple[Point, ...]
    unfinished: Mapping[str, str]


def find_run(name: str) -> NamedRun:
    """Look up a run by the name of its folder below `runs/`, or by a folder's path.

    Raises:
        ArgumentError: there is no such folder, or it holds no executed notebook.
    """
    folder = Path(name) if _is_path(name) else RUNS / name
    if not folder.is_dir():
        known = ", ".join(sorted(path.name for path in RUNS.iterdir() if path.is_dir())) if RUNS.is_dir() else ""
        raise ArgumentError("name", f"a named run, a folder of {RUNS} ({known or 'there is none yet'})", repr(name))
    finished = _by_folder(folder, lambda path: not path.name.endswith(PARTIAL_SUFFIX))
    partial = _by_folder(folder, lambda path: path.name.endswith(PARTIAL_SUFFIX))
    problems = {}
    for path in [path for paths in finished.values() for path in paths]:
        problem = last_problem(path) or marker_problem(path)
        if problem:
            problems[path.relative_to(folder).as_posix()] = problem
    for path in [path for paths in partial.values() for path in paths]:
        output = path.with_name(path.name.removesuffix(PARTIAL_SUFFIX) + ".ipynb")
        if not output.exists():
            problems[output.relative_to(folder).as_posix()] = str(last_problem(output))
    for missing in _planned(folder) - {path.name for path in (*finished, *partial)}:
        problems[missing] = "it did not start"
    if not finished and not problems:
        raise ArgumentError("name", "a folder with executed notebooks", f"{folder}, which holds none")
    points = tuple(_point(folder, place, paths) for place, paths in finished.items())
    return NamedRun(folder.resolve().name, folder, points, dict(sorted(problems.items())))


def check_complete(run: NamedRun) -> None:
    """Refuse a run in which anything did not finish.

    Raises:
        NotebookError: what did not finish, the first few of them with the reason, and the next step.
    """
    if not run.unfinished:
        return
    first = "; ".join(f"{place}: {problem}" for place, problem in list(run.unfinished.items())[:3])
    more = f"; and {len(run.unfinished) - 3} more" if len(run.unfinished) > 3 else ""
    again = "run it again, what finished is not repeated"
    raise NotebookError(f"{run.name} did not complete: {first}{more}; {again} (`kdlab run`, `kdlab grid`)")


def _is_path(name: str) -> bool:
    return "/" in name or name in (".", "..") or not name


def _by_folder(folder: Path, wanted: Any) -> dict[Path, list[Path]]:
    found: dict[Path, list[Path]] = {}
    for path in sorted(folder.rglob("*.ipynb")):
        if wanted(path) and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            found.setdefault(path.parent, []).append(path)
    return found


def _planned(folder: Path) -> set[str]:
    plan = folder / PLAN
    if not plan.is_file():
        return set()
    try:
        return {str(point["id"]) for point in json.loads(plan.read_text(encoding="utf-8"))["points"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError("name", f"{PLAN} with the points of a grid", f"{plan}, which is broken") from error


def _point(folder: Path, place: Path, notebooks: list[Path]) -> Point:
    name = "" if place == folder else place.relative_to(folder).as_posix()
    return Point(name, place, tuple(notebooks), {path.stem: given_parameters(path) for path in notebooks})


def given_parameters(notebook: Path) -> dict[str, Any]:
    """Return the parameters that an executed notebook was given, without the folders of FOLDERS."""
    facts = read_notebook_json(notebook)["metadata"].get("papermill", {})
    return {name: value for name, value in facts.get("parameters", {}).items() if name not in FOLDERS}
