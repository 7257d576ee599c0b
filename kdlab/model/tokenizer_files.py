"""What a checkpoint directory says about its tokens: vocabulary size, stop tokens, special tokens."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kdlab.config_fields import Fields, read_json_object
from kdlab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """One entry of `added_tokens_decoder`: `hidden` tokens vanish when special tokens are skipped."""

    id: int
    text: str
    hidden: bool


def read_fields(path: Path) -> Fields:
    """Return the object in a JSON file, an empty one where there is no such file.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    return Fields(read_json_object(path) if path.is_file() else {}, str(path))


def _config_sections(directory: Path) -> list[Fields]:
    config = read_fields(directory / "config.json")
    sections = (config, config.section("text_config"), read_fields(directory / "generation_config.json"))
    return [section for section in sections if section is not None]


def model_vocab_size(directory: Path) -> int | None:
    """Return `vocab_size` of config.json (flat or under `text_config`), or None where it says nothing.

    Raises:
        ConfigError: it is no positive integer.
    """
    sizes = (section.integer("vocab_size", None) for section in _config_sections(directory))
    return next((size for size in sizes if size is not None), None)


def configured_stop_ids(directory: Path, vocab_size: int) -> frozenset[int]:
    """Return every `eos_token_id` of config.json, its `text_config` and generation_config.json.

    Args:
        directory: the checkpoint directory.
        vocab_size: ids must lie below it.

    Raises:
        ConfigError: an id is no integer or lies outside the vocabulary.
    """
    stops: set[int] = set()
    for section in _config_sections(directory):
        ids = section.integers("eos_token_id", ())
        if not all(0 <= token < vocab_size for token in ids):
            raise section.fail("eos_token_id", f"ids from 0 to {vocab_size - 1}", ids)
        stops.update(ids)
    return frozenset(stops)


def declared_special_tokens(directory: Path) -> list[SpecialToken]:
    """Return the `added_tokens_decoder` of tokenizer_config.json, by id.

    Raises:
        ConfigError: an entry has no integer id or no text.
    """
    declared = read_fields(directory / "tokenizer_config.json").section("added_tokens_decoder")
    if declared is None:
        return []
    tokens = []
    for key, entry in declared.values.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not re.fullmatch("[0-9]{1,9}", key) or not isinstance(content, str) or not content:
            raise declared.fail(key, "an id and its content", entry)
        tokens.append(SpecialToken(int(key), content, bool(entry.get("special", True))))
    return sorted(tokens, key=lambda token: token.id)


def _eos_token_text(directory: Path) -> str | None:
    """Return the text of tokenizer_config.json's `eos_token` (a string or an object with `content`), if any.

    Raises:
        ConfigError: it is something else.
    """
    config = read_fields(directory / "tokenizer_config.json")
    value = config.get("eos_token", None)
    text = value.get("content") if isinstance(value, dict) else value
    if value is not None and not isinstance(text, str):
        raise config.fail("eos_token", "a text, or an object with content", value)
    return text


def with_eos_token(directory: Path, stops: frozenset[int], ids: Mapping[str, int]) -> frozenset[int]:
    """Return `stops` and the id of tokenizer_config.json's `eos_token`.

    Args:
        directory: the checkpoint directory.
        stops: stop ids known otherwise.
        ids: the id of every token that may be named.

    Raises:
        ConfigError: the named token has no id and there is no other stop, so that no text would end.
    """
    text = _eos_token_text(directory)
    if text is None:
        return stops
    if text not in ids and not stops:
        raise ConfigError(f"{directory}/tokenizer_config.json: eos_token: expected a known token, got {text!r}")
    return stops | {ids[text]} if text in ids else stops
