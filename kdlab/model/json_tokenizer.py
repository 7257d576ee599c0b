"""Hugging Face `tokenizer.json`, through the `tokenizers` package."""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import tokenizers

from kdlab.checks import check_int
from kdlab.errors import ConfigError
from kdlab.model.token_text import printable
from kdlab.model.tokenizer_files import configured_stop_ids, model_vocab_size, with_eos_token


class JsonTokenizer:
    """A `tokenizers.Tokenizer` whose `encode` treats typed special tokens as text and adds none."""

    def __init__(self, inner: tokenizers.Tokenizer, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
        inner.encode_special_tokens = True  # the package's name for "special tokens in a text are split as text"
        self._inner = inner
        self.vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids
        added = inner.get_added_tokens_decoder()
        self.special_tokens = MappingProxyType({token.content: i for i, token in added.items()})

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` as ordinary text, without a begin or end token."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`; broken UTF-8 becomes U+FFFD.

        Args:
            ids: token ids below `vocab_size`; ids that pad the model's vocabulary and name no token give no text.
            skip_special: leave out special tokens.
        """
        return self._inner.decode([self._checked(i) for i in ids], skip_special_tokens=skip_special)

    def token_text(self, token_id: int) -> str:
        """Return the text of `token_id` in printable form; the stored piece where it is no text on its own."""
        piece = self._inner.id_to_token(self._checked(token_id))
        if piece is None:
            return f"<{token_id}>"
        text = self._inner.decode([token_id], skip_special_tokens=False)
        return printable(piece if not text or "�" in text else text)

    def _checked(self, token_id: int) -> int:
        return check_int("token id", token_id, minimum=0, maximum=self.vocab_size - 1)


def load_json_tokenizer(directory: Path) -> JsonTokenizer:
    """Load `tokenizer.json` of a checkpoint directory.

    Raises:
        ConfigError: the `tokenizers` package cannot read it, or the model's vocabulary is too small for it.
    """
    path = directory / "tokenizer.json"
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise ConfigError(f"{path}: {error}") from error
    ids = inner.get_vocab(with_added_tokens=True)
    num_tokens = 1 + max(ids.values(), default=-1)
    vocab_size = model_vocab_size(directory)
    if vocab_size is None:
        vocab_size = num_tokens
    if vocab_size < num_tokens:
        raise ConfigError(f"{directory}: config.json has vocab_size {vocab_size}, tokenizer.json {num_tokens} tokens")
    stops = with_eos_token(directory, configured_stop_ids(directory, vocab_size), ids)
    return JsonTokenizer(inner, vocab_size, stops)
