"""Characters as tokens: the id of a character is its code point."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kdlab.checks import check_int
from kdlab.errors import ArgumentError
from kdlab.model.token_text import printable
from kdlab.model.tokenizer_files import configured_stop_ids, read_fields

_REPLACEMENT = "�"


class CharacterTokenizer:
    """A vocabulary of the first `vocab_size` Unicode characters, without special tokens."""

    special_tokens: Mapping[str, int] = MappingProxyType({})

    def __init__(self, vocab_size: int, stop_token_ids: frozenset[int] = frozenset()) -> None:
        self.vocab_size = check_int("vocab_size", vocab_size, minimum=1, maximum=0x110000)
        self.stop_token_ids = stop_token_ids

    def encode(self, text: str) -> list[int]:
        """Return the code point of every character.

        Raises:
            ArgumentError: a character lies outside the vocabulary.
        """
        ids = list(map(ord, text))
        for place, token in enumerate(ids):
            if token >= self.vocab_size:
                expected = f"characters below U+{self.vocab_size:04X}"
                raise ArgumentError("text", expected, f"{text[place]!r} (U+{token:04X}) at character {place}")
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the characters of `ids`; there are no special tokens, so `skip_special` changes nothing."""
        return "".join(map(self._character, ids))

    def token_text(self, token_id: int) -> str:
        """Return the character of `token_id` in printable form."""
        return printable(self._character(token_id))

    def _character(self, token_id: int) -> str:
        code = check_int("token id", token_id, minimum=0, maximum=self.vocab_size - 1)
        is_surrogate = 0xD800 <= code <= 0xDFFF  # half of a UTF-16 pair: no text file can hold it
        return _REPLACEMENT if is_surrogate else chr(code)


def load_character_tokenizer(directory: Path) -> CharacterTokenizer:
    """Load a checkpoint directory whose tokenizer_config.json says how many characters there are.

    Raises:
        ConfigError: `vocab_size` is missing or no positive integer, or a stop token lies outside it.
    """
    vocab_size = read_fields(directory / "tokenizer_config.json").integer("vocab_size")
    return CharacterTokenizer(vocab_size, configured_stop_ids(directory, vocab_size))
