"""Notebook files read: whole by nbformat where they are rendered, as plain JSON where only facts are looked up."""

import contextlib
import json
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError


def read_notebook(path: Path) -> Any:
    """Read a notebook as nbformat 4, older formats converted.

    Raises:
        ArgumentError: there is no such file, or it is no notebook.
        OSError: it cannot be read.
    """
    import nbformat

    try:
        return nbformat.reads(_read_bytes(path).decode(), as_version=4)
    except Exception as error:  # nbformat lets KeyError, AttributeError and its own errors out for a broken file
        if isinstance(error, ArgumentError | OSError):
            raise
        got = f"{path}, which is not a notebook ({type(error).__name__})"
        raise ArgumentError("notebook", "a Jupyter notebook", got) from error


def read_notebook_json(path: Path) -> Any:
    """Read a notebook as the plain dictionaries of its file, where any text may be a list of pieces.

    A format 4 file is not validated: importing nbformat takes longer than all else that a run with nothing to do does.

    Raises:
        ArgumentError: there is no such file, or it is no notebook.
        OSError: it cannot be read.
    """
    content = _read_bytes(path)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        notebook = json.loads(content.decode())
        if notebook["nbformat"] == 4 and isinstance(notebook["cells"], list):
            return notebook
    return read_notebook(path)  # converts an older format, or says what is wrong


def _read_bytes(path: Path) -> bytes:
    if not path.is_file():
        got = "a folder" if path.is_dir() else "none"
        raise ArgumentError("notebook", "an existing file", f"{got} at {path} (working directory {Path.cwd()})")
    return path.read_bytes()
