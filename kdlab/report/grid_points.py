"""The points of a grid: products of parameter values, or the rows of a file, checked before anything runs."""

import csv
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError, ParameterError
from kdlab.report.param_text import parse_assignments
from kdlab.report.params import Parameter, bind_parameters
from kdlab.report.placement import FOLDERS

# One value of several with commas between: quoted text, a JSON list, or all up to the next comma.
_ITEM = re.compile(r"""\s*("[^"]*"|'[^']*'|\[[^\]]*\]|[^,]*?)\s*(,|$)""", re.DOTALL)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.+-]+")
_NAME_LENGTH = 60  # characters of a folder's name before the hash


def read_points(
    assignments: Iterable[str], file: str | Path | None, declared: Mapping[str, Parameter]
) -> list[dict[str, Any]]:
    """Return the points of a command line: the rows of `file`, each with the product of the values of `assignments`.

    Args:
        assignments: `name=value,value,...` texts. Where the default is a list each text is one value, `budgets=7,15`;
            a name may come again and adds values. Quotes keep a comma inside a text.
        file: a .csv with a header (an empty cell is the default), or a .yaml, .yml or .json list of mappings.
        declared: the notebook's parameters by name.

    Returns:
        Parameter values by name for each point, in the order in which they run.

    Raises:
        ParameterError: a name is unknown, given in both, or a value cannot be read or has a wrong type.
        ArgumentError: `file` holds no points or has another form.
        FileNotFoundError: there is no such file.
    """
    values = _read_values(assignments, declared)
    rows = [{}] if file is None else _read_file(Path(file), declared)
    both = sorted(set(values) & {name for row in rows for name in row})
    if both:
        raise ParameterError(f"parameter {both[0]!r}: given both by {file} and beside it")
    products = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    return [row | product for row in rows for product in products]


def check_points(
    points: Sequence[Mapping[str, Any]], declared: Mapping[str, Parameter]
) -> dict[str, dict[str, Any]]:
    """Check points against what the notebook declares.

    Returns:
        The values of each point in their JSON form, by the name of its folder: readable, and another one for other
        values.

    Raises:
        ParameterError: a name is unknown, a value has a wrong type, or two points are the same or write to one folder.
        ArgumentError: there are no points.
    """
    found: dict[str, dict[str, Any]] = {}
    for i, point in enumerate(points, 1):
        values = bind_parameters(declared, point)
        name = point_name(values)
        if name in found:
            raise ParameterError(f"point {i} is the same as point {list(found).index(name) + 1}: {describe(values)}")
        found[name] = values
    if not found:
        raise ArgumentError("points", "at least one", "none")
    for name in FOLDERS:
        given = [values[name] for values in found.values() if isinstance(values.get(name), str)]
        if len(set(given)) < len(given):
            raise ParameterError(f"{name}: expected another folder for each point, or none given: each has its own")
    return found


def describe(values: Mapping[str, Any]) -> str:
    """Return the values of a point as a line."""
    return ", ".join(f"{name}={_one_line(value)}" for name, value in values.items()) or "the defaults"


def _one_line(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() else repr(text)  # a line break or a terminal's codes would spoil what is printed


def point_name(values: Mapping[str, Any]) -> str:
    """Return the name of a point's folder."""
    digest = hashlib.sha256(json.dumps(dict(values), sort_keys=True).encode()).hexdigest()[:10]
    words = _NOT_IN_NAMES.sub("-", "_".join(f"{name}-{value}" for name, value in values.items()))
    return f"{words[:_NAME_LENGTH].strip('.-')}.{digest}" if words else f"defaults.{digest}"


def _read_values(assignments: Iterable[str], declared: Mapping[str, Parameter]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        is_one = not equals or name not in declared or isinstance(declared[name].default, list)
        texts = [text] if is_one else [f"{name}={item}" for item in _items(value)]
        for one in texts:  # a wrong text is refused here
            found = parse_assignments([one], declared)[name]
            if any(type(found) is type(known) and found == known for known in values.get(name, [])):
                raise ParameterError(f"parameter {name!r}: the value {found!r} is given twice")
            values.setdefault(name, []).append(found)
    return values


def _items(text: str) -> list[str]:
    items, at = [], 0
    while True:
        match = _ITEM.match(text, at)
        assert match is not None  # the last alternative takes whatever there is
        items.append(match[1])
        if not match[2]:
            return items
        at = match.end()


def _read_file(path: Path, declared: Mapping[str, Parameter]) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        rows = _read_csv(path, declared)
    elif path.suffix in (".yaml", ".yml", ".json"):
        rows = _read_yaml(path)
    else:
        raise ArgumentError("points", "a file that ends in .csv, .yaml, .yml or .json", str(path))
    if not rows:
        raise ArgumentError("points", f"at least one point in {path}", "none")
    return rows


def _read_csv(path: Path, declared: Mapping[str, Parameter]) -> list[dict[str, Any]]:
    rows = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True, skipinitialspace=True)
        try:
            parse_assignments([f"{name}=" for name in reader.fieldnames or [] if name not in declared], declared)
            for row in reader:
                if None in row or None in row.values():
                    got = f"another number in line {reader.line_num}"
                    raise ArgumentError(str(path), f"{len(reader.fieldnames or [])} cells a line", got)
                texts = [f"{name}={text}" for name, text in row.items() if text]
                rows.append(parse_assignments(texts, declared))
        except (csv.Error, UnicodeDecodeError) as error:
            got = f"{error}, line {reader.line_num}"
            raise ArgumentError(str(path), "comma-separated values in UTF-8", got) from error
        except ParameterError as error:
            raise ParameterError(f"{path}, line {reader.line_num}: {error}") from error
    return rows


def _read_yaml(path: Path) -> list[dict[str, Any]]:
    import yaml

    is_json = path.suffix == ".json"
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if is_json else yaml.safe_load(text)  # YAML reads JSON's \ud83d\ude42 as two halves
    except (ValueError, yaml.YAMLError) as error:
        raise ArgumentError(str(path), "JSON" if is_json else "YAML", " ".join(str(error).split())) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ArgumentError(str(path), "a list of mappings, one a point", type(rows).__name__)
    return [{str(name): value for name, value in row.items()} for row in rows]
