"""What a checkpoint directory says about its tokens: vocabulary size, stop tokens, special tokens."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdlab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """One entry of `added_tokens_decoder`: `hidden` tokens vanish when special tokens are skipped."""

    id: int
    text: str
    hidden: bool


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty dict where there is no such file.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _config_sections(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    config = read_json(directory / "config.json")
    yield "config.json", config
    yield "config.json: text_config", config.get("text_config") or {}
    yield "generation_config.json", read_json(directory / "generation_config.json")


def model_vocab_size(directory: Path) -> int | None:
    """Return `vocab_size` of config.json (flat or under `text_config`), or None where it says nothing."""
    for _, section in _config_sections(directory):
        if section.get("vocab_size") is not None:
            return int(section["vocab_size"])
    return None


def configured_stop_ids(directory: Path, vocab_size: int) -> frozenset[int]:
    """Return every `eos_token_id` of config.json, its `text_config` and generation_config.json.

    Args:
        directory: the checkpoint directory.
        vocab_size: ids must lie below it.

    Raises:
        ConfigError: an id is no integer or lies outside the vocabulary.
    """
    stops: set[int] = set()
    for name, section in _config_sections(directory):
        value = section.get("eos_token_id")
        for token in [] if value is None else value if isinstance(value, list) else [value]:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise ConfigError(f"{directory}/{name}: eos_token_id: expected ids below {vocab_size}, got {token!r}")
            stops.add(token)
    return frozenset(stops)


def declared_special_tokens(directory: Path) -> list[SpecialToken]:
    """Return the `added_tokens_decoder` of tokenizer_config.json, by id.

    Raises:
        ConfigError: an entry has no integer id or no text.
    """
    path = directory / "tokenizer_config.json"
    tokens = []
    for key, entry in read_json(path).get("added_tokens_decoder", {}).items():
        if not key.isdecimal() or not isinstance(entry, dict) or not entry.get("content"):
            raise ConfigError(f"{path}: added_tokens_decoder[{key!r}]: expected an id and its content, got {entry!r}")
        tokens.append(SpecialToken(int(key), entry["content"], bool(entry.get("special", True))))
    return sorted(tokens, key=lambda token: token.id)


def eos_token_text(directory: Path) -> str | None:
    """Return the text of tokenizer_config.json's `eos_token` (a string or an object with `content`), if any."""
    value = read_json(directory / "tokenizer_config.json").get("eos_token")
    return value.get("content") if isinstance(value, dict) else value
