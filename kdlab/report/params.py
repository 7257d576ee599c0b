"""The parameters of a notebook: what its `parameters` cell declares, and values checked against that."""

import ast
import io
import math
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdlab.errors import ParameterError

TAG = "parameters"
INJECTED_TAG = "injected-parameters"
"""The tag of the cell that papermill adds; no count of cells includes it, so numbers are those of the notebook."""
_KINDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "text", list: "a list"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One line of the parameters cell: name, default value, and the comment behind it."""

    name: str
    default: Any
    help: str = ""

    @property
    def expected(self) -> str:
        """What a value must be, in words; a default of None admits every plain value."""
        return "a number, text, a list, true, false or none" if self.default is None else _KINDS[type(self.default)]


def declared_parameters(notebook: Mapping[str, Any], name: str = "notebook") -> dict[str, Parameter] | None:
    """Read the cell tagged `parameters` without running it.

    Args:
        notebook: nbformat 4, as `read_notebook` or `read_notebook_json` gives it.
        name: what to call it in errors.

    Returns:
        The parameters by name in the cell's order, or None when no cell has the tag.

    Raises:
        ParameterError: two cells have the tag, or the cell holds more than `name = literal` lines.
    """
    cells = [
        cell
        for cell in notebook["cells"]
        if cell["cell_type"] == "code" and TAG in cell.get("metadata", {}).get("tags", [])
    ]
    if not cells:
        return None
    if len(cells) > 1:
        raise ParameterError(f"{name}: expected one cell tagged {TAG!r}, got {len(cells)}")
    return _read_cell("".join(cells[0]["source"]), name)


def _read_cell(source: str, name: str) -> dict[str, Parameter]:
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ParameterError(f"{name}: the parameters cell is not Python: {error.msg}, line {error.lineno}") from error
    comments = _comments(source)
    found: dict[str, Parameter] = {}
    for statement in body:
        parameter = _read_statement(statement, comments, name)
        if parameter.name in found:
            raise ParameterError(f"{name}: the parameters cell sets {parameter.name!r} twice")
        found[parameter.name] = parameter
    return found


def _read_statement(statement: ast.stmt, comments: Mapping[int, str], name: str) -> Parameter:
    line = statement.lineno
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target, value = statement.target, statement.value
    else:
        raise ParameterError(f"{name}: line {line} of the parameters cell: expected `name = literal`, one a line")
    if not isinstance(target, ast.Name):
        got = ast.unparse(target)
        raise ParameterError(f"{name}: line {line} of the parameters cell: expected one name before `=`, got {got!r}")
    try:
        default = plain_value(target.id, ast.literal_eval(value))
    except (ValueError, TypeError) as error:
        got = ast.unparse(value)
        raise ParameterError(f"{name}: parameter {target.id!r}: expected a literal, got {got!r}") from error
    return Parameter(target.id, default, comments.get(statement.end_lineno or line, ""))


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def bind_parameters(declared: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check values against what a notebook declares and put them into the declared order.

    An int is taken where the default is a float; nothing else changes its type. Numpy numbers, paths and tuples become
    their plain forms first.

    Args:
        declared: the notebook's parameters by name.
        given: values for some of them.

    Returns:
        The given values, checked, in their JSON form.

    Raises:
        ParameterError: a name is unknown, or a value has another type than the default.
    """
    for name in given:
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise ParameterError(f"unknown parameter {name!r}; known: {known}")
    return {name: _check(parameter, given[name]) for name, parameter in declared.items() if name in given}


def _check(parameter: Parameter, value: Any) -> Any:
    value = plain_value(parameter.name, value)
    default = parameter.default
    if default is None:
        return value
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise ParameterError(f"{parameter.name}: expected {parameter.expected}, got {value!r}")
    if isinstance(default, list) and default:
        return [_check_item(parameter, item) for item in value]
    return value


def _check_item(parameter: Parameter, item: Any) -> Any:
    kinds = {type(known) for known in parameter.default}
    if type(item) in kinds:
        return item
    if type(item) is int and float in kinds:
        return float(item)
    expected = " or ".join(sorted(_KINDS.get(kind, "none") for kind in kinds))
    raise ParameterError(f"{parameter.name}: expected a list whose items are {expected}, got the item {item!r}")


def plain_value(name: str, value: Any) -> Any:
    """Return the JSON form of a parameter value.

    Args:
        name: what to call it in errors.
        value: numpy and torch numbers and arrays, paths and tuples become their plain forms.

    Returns:
        A finite number, a bool, text, None, or a list of those.

    Raises:
        ParameterError: `value` is anything else.
    """
    if hasattr(value, "tolist"):  # numpy and torch numbers and arrays
        value = value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain_value(name, item) for item in value]
    if isinstance(value, str):
        return _utf8(name, value)
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    raise ParameterError(f"{name}: expected a finite number, a bool, text, None, or a list of those, got {value!r}")


def _utf8(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of a command line that are no UTF-8, half of a pair in JSON
        raise ParameterError(f"{name}: expected text that UTF-8 can hold, got {text!a}") from error
    return str(text)
