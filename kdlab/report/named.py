"""A named run: the executed notebooks below one folder, a point a folder, and whether all finished.

It is a folder that `kdlab run -o runs/NAME/...` filled, or a grid's, `runs/grids/NAME`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError, NotebookError
from kdlab.paths import GRIDS, RUNS
from kdlab.report.done_marker import marker_problem
from kdlab.report.notebook_file import read_notebook_json
from kdlab.report.outcome import PARTIAL_SUFFIX, last_problem
from kdlab.report.placement import FOLDERS

PLAN = "grid.json"
"""Of a grid: holds the parameters of its points by the names of their folders, in the order in which they run."""


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
    """Look up a run by the name of its folder below `runs/` or `runs/grids/`, or by a folder's path.

    Of a grid only the points of its last call count: others may lie in its folder from before.

    Raises:
        ArgumentError: there is no such folder, there are two, it holds no executed notebook, or its plan is broken.
    """
    folder = _folder(name)
    planned = _planned(folder)
    places = sorted({path.parent for path in folder.rglob("*.ipynb") if not _is_hidden(path, folder)})
    if planned is not None:
        places = [folder / point for point in planned]
    points: list[Point] = []
    problems: dict[str, str] = {}
    for place in places:
        point, found = _read_point(folder, place)
        problems |= found
        points += [point] if point.notebooks else []
        if not point.notebooks and not found:
            problems[point.name] = "it did not start"
    if not points and not problems:
        raise ArgumentError("name", "a folder with executed notebooks", f"{folder}, which holds none")
    return NamedRun(folder.resolve().name, folder, tuple(points), problems)


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


def _folder(name: str) -> Path:
    if "/" in name or name in ("", ".", ".."):
        found = [Path(name)] if name and Path(name).is_dir() else []
    else:
        found = [root / name for root in (RUNS, GRIDS) if (root / name).is_dir() and root / name != GRIDS]
    if not found:
        known = [path for root in (RUNS, GRIDS) if root.is_dir() for path in root.iterdir() if path.is_dir()]
        names = ", ".join(sorted({path.name for path in known if path != GRIDS})) or "there is none yet"
        raise ArgumentError("name", f"a named run, a folder of {RUNS} or {GRIDS} ({names})", repr(name))
    if len(found) > 1:
        raise ArgumentError("name", f"one run; give the folder, {found[0]} or {found[1]}", repr(name))
    return found[0]


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _planned(folder: Path) -> list[str] | None:
    plan = folder / PLAN
    if not plan.is_file():
        return None
    try:
        return list(json.loads(plan.read_text(encoding="utf-8"))["points"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError("name", f"a grid whose {PLAN} is whole", f"{plan}, which is broken") from error


def _read_point(folder: Path, place: Path) -> tuple[Point, dict[str, str]]:
    """Return a point, and what of it did not finish: reasons by place below `folder`."""
    outputs, problems = [], {}
    for path in sorted(place.glob("*.ipynb")):
        partial = path.name.endswith(PARTIAL_SUFFIX)
        output = path.with_name(path.name.removesuffix(PARTIAL_SUFFIX) + ".ipynb") if partial else path
        problem = last_problem(output) or marker_problem(output)
        if problem:
            problems[output.relative_to(folder).as_posix()] = problem
        outputs += [] if partial else [output]
    name = "" if place == folder else place.relative_to(folder).as_posix()
    return Point(name, place, tuple(outputs), {path.stem: given_parameters(path) for path in outputs}), problems


def given_parameters(notebook: Path) -> dict[str, Any]:
    """Return the parameters that an executed notebook was given, without the folders of FOLDERS."""
    facts = read_notebook_json(notebook)["metadata"].get("papermill", {})
    return {name: value for name, value in facts.get("parameters", {}).items() if name not in FOLDERS}
