"""The run row of a result file, JSON in its metadata: read once, key by key, so that damage is named."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from kdlab.checks import MAX_TOKEN
from kdlab.errors import SchemaError

RUN_KEY = "run"

Rule = tuple[str, Callable[[Any], bool]]  # what is expected, and whether a value is that


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


TEXT: Rule = ("a text", lambda value: isinstance(value, str))
COUNT: Rule = ("a count", _is_count)
IDS: Rule = ("a list of token ids", _is_ids)
LIST: Rule = ("a list", lambda value: isinstance(value, list))
OBJECT: Rule = ("an object", lambda value: isinstance(value, dict))
FINISH: Rule = ("'stop', 'length' or 'context'", lambda value: value in ("stop", "length", "context"))
OPTIONAL_TEXT: Rule = ("a text or null", lambda value: value is None or isinstance(value, str))
OPTIONAL_IDS: Rule = ("a list of token ids or null", lambda value: value is None or _is_ids(value))


def read_run_row(
    path: str, metadata: Mapping[str, str], rules: Mapping[str, Rule], prompt_rules: Mapping[str, Rule]
) -> dict[str, Any]:
    """Return the run row of a file.

    Args:
        path: named in the errors.
        metadata: text kept beside the table, by name.
        rules: what every key of the row must hold, `prompts` left out.
        prompt_rules: what every key of each entry of `prompts` must hold.

    Raises:
        SchemaError: the row is missing or no JSON object, or a key is missing or holds something else.
    """
    if RUN_KEY not in metadata:
        raise SchemaError(f"{path}: no {RUN_KEY!r} in its metadata")
    try:
        row = json.loads(metadata[RUN_KEY])
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{path}: {RUN_KEY}: expected JSON, got {error}") from error
    _check(path, row, {**rules, "prompts": LIST})
    for index, entry in enumerate(row["prompts"]):
        _check(f"{path}: prompts[{index}]", entry, prompt_rules)
    return row


def _check(where: str, values: Any, rules: Mapping[str, Rule]) -> None:
    if not isinstance(values, dict):
        raise SchemaError(f"{where}: expected an object, got {values!r:.60}")
    for key, (expected, is_good) in rules.items():
        if key not in values or not is_good(values[key]):
            got = f"{values[key]!r:.60}" if key in values else "nothing"
            raise SchemaError(f"{where}: {key}: expected {expected}, got {got}")
