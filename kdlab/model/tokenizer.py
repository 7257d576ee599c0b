"""Text to token ids and back: what every tokenizer offers, and which one a checkpoint directory holds."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kdlab.errors import ArgumentError, ConfigError
from kdlab.model.character_tokenizer import load_character_tokenizer
from kdlab.model.ids_only import TokenIdsOnly
from kdlab.model.json_tokenizer import load_json_tokenizer
from kdlab.model.tiktoken_tokenizer import load_tiktoken_tokenizer
from kdlab.model.tokenizer_files import configured_stop_ids, read_fields


class Tokenizer(Protocol):
    """Text and token ids; ids are below `vocab_size`, generation ends at `stop_token_ids`."""

    vocab_size: int
    stop_token_ids: frozenset[int]

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids that no text encodes to, by name."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, special tokens in it taken as ordinary text."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`; defined for all ids below `vocab_size`."""

    def token_text(self, token_id: int) -> str:
        """Return one token in printable form, for drawings."""


class NoTokenizer(ConfigError):
    """A checkpoint directory holds none of the tokenizer files that kdlab reads."""


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory; its files decide which.

    `tiktoken.model` is Kimi's, else `tokenizer.json` is Hugging Face's, else tokenizer_config.json with
    `"tokenizer_class": "CharacterTokenizer"` and `vocab_size` takes characters as tokens.

    Args:
        directory: a checkpoint directory.

    Raises:
        ArgumentError: there is no such directory.
        NoTokenizer: it holds none of these.
        ConfigError: it holds one that is malformed.
    """
    if not isinstance(directory, str | Path) or not os.path.isdir(directory):
        raise ArgumentError("tokenizer directory", "an existing directory", directory)
    directory = Path(directory)
    if (directory / "tiktoken.model").is_file():
        return load_tiktoken_tokenizer(directory)
    if (directory / "tokenizer.json").is_file():
        return load_json_tokenizer(directory)
    if read_fields(directory / "tokenizer_config.json").get("tokenizer_class", None) == "CharacterTokenizer":
        return load_character_tokenizer(directory)
    raise NoTokenizer(
        f"{directory}: no tokenizer: looked for tiktoken.model, tokenizer.json, and a tokenizer_config.json with "
        f'"tokenizer_class": "CharacterTokenizer"'
    )


def load_tokenizer_if_any(directory: Path, vocab_size: int) -> Tokenizer:
    """Load the tokenizer of a checkpoint; where there is none, one that takes token ids and refuses text.

    Args:
        directory: a checkpoint directory.
        vocab_size: of the model.

    Raises:
        ConfigError: a tokenizer or config file is malformed.
    """
    try:
        return load_tokenizer(directory)
    except NoTokenizer as error:
        return TokenIdsOnly(vocab_size, configured_stop_ids(directory, vocab_size), str(error))
