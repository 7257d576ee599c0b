"""Parameter values written as text, as on a command line: `budget=64`, `budgets=7,15`, `device=cuda`."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kdlab.errors import ParameterError
from kdlab.report.params import Parameter

_INT = re.compile(r"[+-]?\d+")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_QUOTED = re.compile(r"""(?s)(['"])(.*)\1""")


def parse_assignments(texts: Iterable[str], declared: Mapping[str, Parameter]) -> dict[str, Any]:
    """Turn `name=value` texts into values; the default of each parameter decides what its text means.

    Text stays text where the default is text (`name=007`); quotes around a whole value are taken off and make it text.
    Lists are JSON (`[7, 15]`) or items with commas (`7,15`). Where the default is None the text is read as none, a
    bool, a number, numbers with commas or a JSON list if it looks like one, else as text.

    Args:
        texts: assignments as a shell gave them.
        declared: the notebook's parameters by name.

    Returns:
        The values by name.

    Raises:
        ParameterError: a text has no `=`, a name comes twice or is unknown, or a value cannot be read.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ParameterError(f"parameter {text!r}: expected name=value")
        if name in values:
            raise ParameterError(f"parameter {name!r}: given twice")
        if name not in declared:
            raise ParameterError(f"unknown parameter {name!r}; known: {', '.join(declared) or 'none'}")
        values[name] = _read(declared[name], value)
    return values


def _read(parameter: Parameter, text: str) -> Any:
    try:
        return _read_as(parameter.default, text)
    except ValueError as error:
        raise ParameterError(f"{parameter.name}: expected {parameter.expected}, got {text!r}") from error


def _read_as(default: Any, text: str) -> Any:
    if default is None:
        return _guess(text)
    if isinstance(default, str):
        quoted = _QUOTED.fullmatch(text)
        return quoted[2] if quoted else text
    if isinstance(default, list):
        return _read_list(default, text)
    if isinstance(default, bool):
        word = _WORDS.get(text.lower())
        if word is None:
            raise ValueError(text)
        return word
    if isinstance(default, int):
        if not _INT.fullmatch(text):
            raise ValueError(text)
        return int(text)
    return float(text)


def _read_list(default: list[Any], text: str) -> list[Any]:
    if text.strip().startswith("["):
        values = json.loads(text)
        return list(values)
    kinds = {type(item) for item in default}
    sample = default[0] if len(kinds) == 1 else None
    return [_read_as(sample, item.strip()) for item in text.split(",")] if text.strip() else []


def _guess(text: str) -> Any:
    quoted = _QUOTED.fullmatch(text)
    if quoted:
        return quoted[2]
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text.startswith("["):
        return json.loads(text)
    try:
        numbers = [_number(item.strip()) for item in text.split(",")]
    except ValueError:
        return text
    return numbers if len(numbers) > 1 else numbers[0]


def _number(text: str) -> int | float:
    return int(text) if _INT.fullmatch(text) else float(text)
