"""Notebook files read: whole by nbformat where they are rendered, as plain JSON where only facts are looked up."""

import contextlib
import json
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError


def read_notebook(path: Path) -> Any:
    """Read a notebook as nbformat 4, older formats converted.

    Raises:
        ArgumentError: the file is no notebook.
        OSError: it cannot be read.
    """
    import nbformat

    text = path.read_text(encoding="utf-8")
    try:
        return nbformat.reads(text, as_version=4)
    except Exception as error:  # nbformat lets KeyError, AttributeError and its own errors out for a broken file
        raise ArgumentError("notebook", "a Jupyter notebook", f"{path} ({type(error).__name__})") from error


def read_notebook_json(path: Path) -> Any:
    """Read a notebook as the plain dictionaries of its file, where any text may be a list of pieces.

    A format 4 file is not validated: importing nbformat takes longer than all else that a run with nothing to do does.

    Raises:
        ArgumentError: the file is no notebook.
        OSError: it cannot be read.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        if notebook["nbformat"] == 4 and isinstance(notebook["cells"], list):
            return notebook
    return read_notebook(path)  # converts an older format, or says what is wrong
