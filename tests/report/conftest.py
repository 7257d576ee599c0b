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


@pytest.fixture
def quick(monkeypatch):
    """Stand in for the child processes: `quick.jobs` would have run, `quick.act` says what else happens in them."""
    from tests.report.test_runner import execute_nothing

    class Quick:
        act = staticmethod(lambda job: None)

    stand_in = Quick()
    stand_in.jobs = []

    def run(job, progress):
        stand_in.jobs.append(job)
        execute_nothing(job, progress)
        return stand_in.act(job)

    monkeypatch.setattr("kdlab.report.runner.NotebookJob.run", run)
    monkeypatch.setattr("kdlab.report.done_marker.source_sha256", lambda: "code")
    monkeypatch.setattr("kdlab.report.done_marker._folder_sha256", lambda folder: "data")
    return stand_in
