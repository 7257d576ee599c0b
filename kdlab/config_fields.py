"""Reads one `config.json` object key by key: every refusal names the file, the key, what was expected and what came."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kdlab.errors import ConfigError

Config = TypeVar("Config")


class _Required:
    """Type of REQUIRED: the default of a key that has none."""


REQUIRED = _Required()

MAX_LAYERS = 1000  # no decoder has so many; a mistyped number would be built before any tensor is missed


class Fields:
    """The keys of one JSON object. A key whose value is null counts as absent, as Hugging Face writes defaults."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: expected a JSON object, got {type(values).__name__}")
        self.values, self.where = values, where

    def fail(self, key: str, expected: str, got: object) -> ConfigError:
        """Return the error that says what `key` should have been."""
        return ConfigError(f"{self.where}: {key}: expected {expected}, got {got!r}")

    def get(self, key: str, default: Any = REQUIRED, expected: str = "a value") -> Any:
        """Return the raw value of `key`, or `default` where it is absent or null."""
        value = self.values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.fail(key, expected, "null" if key in self.values else "nothing")
        return default

    def integer(self, key: str, default: Any = REQUIRED, *, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """Return an integer from `minimum` to `maximum`."""
        expected = f"an integer of at least {minimum}"
        value = self.get(key, default, expected)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(key, expected, value)
        if value > maximum:
            raise self.fail(key, f"an integer of at most {maximum}", value)
        return value

    def number(self, key: str, default: Any = REQUIRED, *, positive: bool = True) -> float:
        """Return a finite number, above zero where `positive`."""
        expected = "a number above 0" if positive else "a number"
        value = self.get(key, default, expected)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
            raise self.fail(key, expected, value)
        if positive and value <= 0:
            raise self.fail(key, expected, value)
        return float(value)

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """Return a JSON boolean."""
        value = self.get(key, default, "true or false")
        if value is not default and not isinstance(value, bool):
            raise self.fail(key, "true or false", value)
        return value

    def choice(self, key: str, allowed: Sequence[Any], default: Any = REQUIRED) -> Any:
        """Return a value out of `allowed`; the default needs not be among them."""
        expected = " or ".join(map(repr, allowed)) or "null"
        value = self.get(key, default, expected)
        if value is not default and not any(value == known and type(value) is type(known) for known in allowed):
            raise self.fail(key, expected, value)
        return value

    def integers(self, key: str, default: Any = REQUIRED) -> tuple[int, ...]:
        """Return one integer or a list of them as a tuple."""
        value = self.get(key, default, "an integer or a list of integers")
        items = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.fail(key, "an integer or a list of integers", value)
        return tuple(items)

    def section(self, key: str) -> "Fields | None":
        """Return the object under `key`, or None where it is absent."""
        value = self.get(key, None)
        return None if value is None else Fields(value, f"{self.where}: {key}")

    def only(self, known: Sequence[str]) -> None:
        """Raise ConfigError where the object holds a non-null key outside `known`."""
        unknown = sorted(key for key, value in self.values.items() if key not in known and value is not None)
        if unknown:
            raise self.fail(unknown[0], "no such key (known: " + ", ".join(known) + ")", self.values[unknown[0]])


def load_config(directory: str | Path, parse: Callable[[Mapping[str, Any]], Config]) -> Config:
    """Return `parse` of the object in `directory`/config.json; its errors then name the directory.

    Raises:
        ConfigError: the file is missing or no JSON object, or `parse` refuses it.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: expected a Hugging Face config.json, got no such file")
    values = read_json_object(path)
    try:
        return parse(values)
    except ConfigError as error:
        raise ConfigError(f"{Path(directory)}/{error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values
