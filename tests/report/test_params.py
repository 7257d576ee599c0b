"""Parameters: what a notebook declares, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from nbformat import v4

from kdlab.errors import ParameterError
from kdlab.report.param_text import parse_assignments
from kdlab.report.params import bind_parameters, declared_parameters
from tests.report.samples import PARAMETERS


def declare(source, **kwargs):
    cell = v4.new_code_cell(source, metadata={"tags": ["parameters"]})
    return declared_parameters(v4.new_notebook(cells=[cell]), **kwargs)


def test_defaults_and_comments_are_read_without_running_the_cell():
    more = "\nshift: int = -3  # negative\n\n# a comment alone\nlong = [\n    1,\n]  # behind a list"
    declared = declare(PARAMETERS + more)
    assert {name: p.default for name, p in declared.items()} == {
        "budget": 32, "rate": 0.5, "smoke": False, "name": "tiny", "budgets": [7, 15], "width": None, "shift": -3,
        "long": [1],
    }  # fmt: skip
    assert declared["budget"].help == "tree nodes"
    assert declared["long"].help == "behind a list"


def test_a_notebook_without_the_cell_declares_nothing():
    assert declared_parameters(v4.new_notebook(cells=[v4.new_code_cell("budget = 1")])) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a, b = 1, 2", "'\\(?a, b\\)?'"),
        ("a = b = 1", "one a line"),
        ("a = 1\nc = a + 1", "'c': expected a literal, got 'a \\+ 1'"),
        ("import os", "line 1"),
        ("a: int", "line 1"),
        ("a = 1\na = 2", "'a' twice"),
        ("x.y = 1", "'x.y'"),
        ("a = {1: 2}", "'a'"),
        ("a = 1e999", "'a'"),
        ("a = (", "not Python"),
    ],
)
def test_more_than_literals_is_refused(source, message):
    with pytest.raises(ParameterError, match=message):
        declare(source)


def test_two_parameter_cells_are_refused():
    cells = [v4.new_code_cell("a = 1", metadata={"tags": ["parameters"]}) for _ in range(2)]
    with pytest.raises(ParameterError, match="got 2"):
        declared_parameters(v4.new_notebook(cells=cells))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("budget=64", 64),
        ("budget=-1", -1),
        ("rate=1e-3", 1e-3),
        ("rate=2", 2.0),
        ("smoke=true", True),
        ("smoke=False", False),
        ("name=007", "007"),
        ("name='a b'", "a b"),
        ("name=a=b", "a=b"),
        ("name=", ""),
        ("budgets=[1, 2]", [1, 2]),
        ("budgets=1,2", [1, 2]),
        ("budgets=", []),
        ("width=8", 8),
        ("width=none", None),
        ("width=1e-3", 1e-3),
        ("width='8'", "8"),
        ("width=[1,2]", [1, 2]),
        ("width=1, 0.5", [1, 0.5]),
        ("width=1,", "1,"),
        ("width=1,wide", "1,wide"),
        ("width='1,2'", "1,2"),
        ("width=wide", "wide"),
    ],
)
def test_text_keeps_the_declared_type(text, value):
    declared = declare(PARAMETERS)
    (got,) = bind_parameters(declared, parse_assignments([text], declared)).values()
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["budget=1e3"], "budget: expected an integer, got '1e3'"),
        (["budget=6 4"], "budget"),
        (["smoke=1"], "smoke: expected true or false"),
        (["rate=fast"], "rate: expected a finite number"),
        (["rate=nan"], "rate"),
        (["budgets=[1,"], "budgets: expected a list"),
        (["budgets=1,x"], "budgets"),
        (["budget"], "name=value"),
        (["=3"], "name=value"),
        (["budget=1", "budget=2"], "given twice"),
        (["bugdet=1"], "unknown parameter 'bugdet'; known: budget, rate, smoke, name, budgets, width"),
    ],
)
def test_text_that_cannot_be_read_is_refused(texts, message):
    declared = declare(PARAMETERS)
    with pytest.raises(ParameterError, match=message):
        bind_parameters(declared, parse_assignments(texts, declared))


def test_plain_values_are_made_of_numpy_numbers_paths_and_tuples():
    given = {"budget": np.int64(3), "rate": np.float32(0.25), "budgets": (1, 2), "name": Path("a/b")}
    given["width"] = np.arange(2)
    assert bind_parameters(declare(PARAMETERS), given) == {
        "budget": 3, "rate": 0.25, "name": "a/b", "budgets": [1, 2], "width": [0, 1],
    }  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        {"budget": True}, {"budget": 1.0}, {"budget": None}, {"smoke": 1}, {"name": 7}, {"budgets": 7},
        {"budgets": ["a"]}, {"budgets": [True]}, {"rate": float("inf")}, {"width": {1}}, {"unknown": 1},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_another_type_are_refused(given):
    with pytest.raises(ParameterError, match=next(iter(given))):
        bind_parameters(declare(PARAMETERS), given)
