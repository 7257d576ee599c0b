"""Notebook files are read whole where that is asked for, and quickly where only facts are looked up."""

import json
import subprocess
import sys

import nbformat
import pytest
from nbformat import v4

from kdlab.errors import ArgumentError
from kdlab.report import declared_parameters, read_notebook, read_notebook_json, read_outcome
from kdlab.report.outcome import RESULT_MIME

QUICK = """
import sys
import kdlab.cli
import kdlab.report
from kdlab.report.param_text import parse_assignments
kdlab.report.read_notebook_json(__import__("pathlib").Path(sys.argv[1]))
heavy = sorted({"torch", "numpy", "pandas", "nbformat", "nbconvert", "nh3", "matplotlib", "IPython"} & set(sys.modules))
assert heavy == [], heavy
"""


def executed():
    record = v4.new_output("display_data", data={RESULT_MIME: {"final": True, "rows": [1, 2]}})
    parameters = v4.new_code_cell("budget = 7  # nodes\nname = 'a'\n", metadata={"tags": ["parameters"]})
    cells = [parameters, v4.new_code_cell(""), v4.new_code_cell("a\nb", outputs=[record])]
    for cell in cells:
        cell.metadata["papermill"] = {"status": "completed" if cell.source else "pending"}
    return v4.new_notebook(cells=cells)


def test_both_readers_find_the_same_facts(tmp_path):
    path = tmp_path / "a.ipynb"
    nbformat.write(executed(), path)
    whole, plain = read_notebook(path), read_notebook_json(path)
    assert isinstance(plain["cells"][0]["source"], list)
    assert read_outcome(plain) == read_outcome(whole)
    assert read_outcome(plain).problem is None
    assert declared_parameters(plain) == declared_parameters(whole)
    assert list(declared_parameters(plain)) == ["budget", "name"]


def test_an_older_format_is_converted(tmp_path):
    path = tmp_path / "old.ipynb"
    cell = {"cell_type": "markdown", "metadata": {}, "source": ["# One"]}
    path.write_text(json.dumps({"worksheets": [{"cells": [cell]}], "metadata": {}, "nbformat": 3, "nbformat_minor": 0}))
    assert read_notebook_json(path)["cells"][0]["source"] == "# One"


@pytest.mark.parametrize("content", ["", "no json", "[]", "{}", '{"nbformat": 4}', '{"nbformat": 4, "cells": 1}'])
@pytest.mark.parametrize("read", [read_notebook, read_notebook_json])
def test_what_is_no_notebook_is_named(tmp_path, read, content):
    path = tmp_path / "x.ipynb"
    path.write_text(content)
    with pytest.raises(ArgumentError, match=r"a Jupyter notebook, got .*x\.ipynb"):
        read(path)


def test_a_run_with_nothing_to_do_loads_nothing_heavy(tmp_path):
    path = tmp_path / "a.ipynb"
    nbformat.write(executed(), path)
    subprocess.run([sys.executable, "-c", QUICK, str(path)], check=True)
