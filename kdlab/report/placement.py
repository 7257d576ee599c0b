"""Where a run's files go: the clone's own folders, or beside a notebook that is written elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError
from kdlab.paths import RUNS
from kdlab.report.params import Parameter

FOLDERS = {"figures": "figures", "results": "."}
"""Parameters that name the folders of a notebook's other files, and where these lie below a folder of their own."""


def output_path(notebook: Path, output: str | Path | None) -> Path:
    """Return where the executed notebook goes: `output`, or the clone's `runs/<name>` whatever the working directory.

    Raises:
        ArgumentError: `output` does not end in .ipynb, or is the notebook itself.
    """
    path = RUNS / notebook.name if output is None else Path(output)
    if path.suffix != ".ipynb" or path.resolve() == notebook.resolve():
        raise ArgumentError("output", "a path that ends in .ipynb and is not the notebook itself", str(path))
    return path


def folder_parameters(
    declared: Mapping[str, Parameter], given: Mapping[str, Any], output: Path
) -> dict[str, str]:
    """Return values for FOLDERS that keep a run's figures and tables beside an `output` outside the clone's `runs/`.

    Args:
        declared: the notebook's parameters by name.
        given: the values that the user set; these names are left alone.
        output: the executed notebook.

    Returns:
        Absolute folders by parameter name; empty for an output in `runs/`, whose files go where the notebook says.
    """
    folder = output.resolve().parent
    if folder == RUNS.resolve():
        return {}
    names = [name for name in FOLDERS if name in declared and name not in given]
    return {name: str(folder / FOLDERS[name]) for name in names if isinstance(declared[name].default, str)}
