"""What the values of a result file must be beyond their types; checked of every row that is read."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from kdlab.errors import SchemaError


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold of a row's values in some columns, of which the first is named where it does not."""

    columns: tuple[str, ...]
    expected: str
    holds: Callable[..., bool]


def check_rules(table: pa.Table, rules: Iterable[Rule], where: str) -> None:
    """Raise SchemaError where a row breaks a rule: it says `where`, column, row, what was expected and what it got."""
    rules = tuple(rules)
    values = {name: table[name].to_pylist() for name in {name for rule in rules for name in rule.columns}}
    for rule in rules:
        for row, found in enumerate(zip(*(values[name] for name in rule.columns), strict=True)):
            if not rule.holds(*found):
                got = f"{found[0]!r:.80}"
                raise SchemaError(
                    f"{where}: column {rule.columns[0]!r}, row {row}: expected {rule.expected}, got {got}"
                )


def json_object(name: str) -> Rule:
    """The column holds JSON objects; a null is for the column to allow."""
    return Rule((name,), "a JSON object", lambda text: text is None or json_of(text) is not None)


def finite(name: str, *, least: float = -math.inf, above: float = -math.inf) -> Rule:
    """The column holds finite numbers of at least `least` or above `above`; a null is for the column to allow."""
    words = [f"{word} {limit:g}" for word, limit in (("of at least", least), ("above", above)) if limit > -math.inf]
    expected = " ".join(["a finite number", *words])
    return Rule((name,), expected, lambda value: value is None or (above < value < math.inf and value >= least))


def is_number(value: object) -> bool:
    """Whether a JSON value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


@lru_cache(maxsize=1 << 14)
def json_of(text: str) -> Mapping[str, Any] | None:
    """Return the JSON object that a text is, None where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
