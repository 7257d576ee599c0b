"""Small notebooks, written by hand for the runner and the report."""

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

v4 = nbformat.v4


@pytest.fixture
def write_notebook(tmp_path: Path) -> Callable[..., Path]:
    """Write a notebook of the given sources: text starting with `#` and a blank is markdown, `P:` is the parameters."""

    def write(*sources: str, name: str = "demo", folder: Path | None = None) -> Path:
        cells = [_cell(source) for source in sources]
        path = (folder or tmp_path) / f"{name}.ipynb"
        nbformat.write(v4.new_notebook(cells=cells), path)
        return path

    return write


def _cell(source: str) -> nbformat.NotebookNode:
    if source.startswith("# "):
        return v4.new_markdown_cell(source)
    if source.startswith("P:"):
        return v4.new_code_cell(source[2:], metadata={"tags": ["parameters"]})
    return v4.new_code_cell(source)
