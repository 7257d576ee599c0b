"""Kimi K2's tokenizer from `tiktoken.model` and `tokenizer_config.json`, without the checkpoint's own code."""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import tiktoken

from kdlab.checks import check_int
from kdlab.errors import ConfigError
from kdlab.model.token_text import printable_bytes
from kdlab.model.tokenizer_files import (
    SpecialToken,
    configured_stop_ids,
    declared_special_tokens,
    model_vocab_size,
    with_eos_token,
)

# Moonshot's tokenizer reserves this many ids after the byte-pair ranks; config.json's vocab_size goes first.
_RESERVED = 256
_MOST_SPECIALS = 1 << 16  # each gets a name; a mistyped vocab_size would take all memory for them
# tiktoken's regex engine overflows its stack on long texts and on long runs without a change of class.
_CHUNK_CHARACTERS = 400_000
_RUN_CHARACTERS = 25_000
# A turn of K2 may end in any of these, whichever of them the configuration names.
_STOP_NAMES = ("[EOS]", "<|im_end|>", "[EOT]")


def _split_pattern() -> str:
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    lead, contraction = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    return "|".join(
        (
            r"[\p{Han}]+",
            f"{lead}{upper}*{lower}+{contraction}",
            f"{lead}{upper}+{lower}*{contraction}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


def split_long_text(text: str, *, chunk: int = _CHUNK_CHARACTERS, run: int = _RUN_CHARACTERS) -> Iterator[str]:
    """Yield `text` in pieces that tiktoken can take: cut every `chunk` characters, and runs of one class every `run`.

    Args:
        text: any string.
        chunk: characters a piece at most.
        run: characters that are all blank, or all not blank, in a row at most.
    """
    for begin in range(0, len(text), chunk):
        part, start = text[begin : begin + chunk], 0
        for match in re.finditer(r"\s+|\S+", part):
            for cut in range(match.start() + run, match.end(), run):
                yield part[start:cut]
                start = cut
        yield part[start:]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the byte-pair ranks of a `tiktoken.model` file: lines of base64 bytes, a blank, the rank.

    Raises:
        ConfigError: a line is malformed (named by number), or the ranks are not 0, 1, 2 and so on,
            or a single byte has none.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(f"{path}:{number}: expected base64 bytes and a rank, got {line[:60]!r}") from error
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(f"{path}: expected the ranks 0..{max(len(ranks) - 1, 0)}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:  # tiktoken aborts on a text that holds one of them
        raise ConfigError(f"{path}: expected a rank for every single byte, none for {missing}")
    return ranks


class TiktokenTokenizer:
    """Byte-pair ranks 0..n-1, then special ids; `encode` never makes a special id out of text."""

    def __init__(
        self,
        ranks: dict[bytes, int],
        specials: Sequence[SpecialToken],
        vocab_size: int,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.vocab_size = vocab_size
        self._num_ranks = len(ranks)
        names = {i: f"<|reserved_token_{i}|>" for i in range(len(ranks), vocab_size)}
        for special in specials:
            if special.id not in names:
                expected = f"an id in {len(ranks)}..{vocab_size - 1}"
                raise ConfigError(f"special token {special.text}: expected {expected}, got {special.id}")
            names[special.id] = special.text
        if len(set(names.values())) != len(names):
            raise ConfigError("added_tokens_decoder: expected distinct texts, got one text at two ids")
        self.special_tokens = MappingProxyType({name: i for i, name in names.items()})
        self._hidden = frozenset(names) - {special.id for special in specials if not special.hidden}
        self.stop_token_ids = stop_token_ids
        self._ranks = ranks

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        return tiktoken.Encoding(
            "kimi", pat_str=_split_pattern(), mergeable_ranks=self._ranks, special_tokens=dict(self.special_tokens)
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` as ordinary text: a typed `<|im_end|>` stays text."""
        return [token for piece in split_long_text(text) for token in self._encoding.encode_ordinary(piece)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`; broken UTF-8 becomes U+FFFD.

        Args:
            ids: token ids below `vocab_size`.
            skip_special: leave out the tokens that the tokenizer's configuration flags as special.
        """
        kept = [self._checked(i) for i in ids]
        if skip_special:
            kept = [i for i in kept if i not in self._hidden]
        return self._encoding.decode_bytes(kept).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        """Return the bytes of `token_id` in printable form."""
        return printable_bytes(self._encoding.decode_single_token_bytes(self._checked(token_id)))

    def _checked(self, token_id: int) -> int:
        return check_int("token id", token_id, minimum=0, maximum=self.vocab_size - 1)


def load_tiktoken_tokenizer(directory: Path) -> TiktokenTokenizer:
    """Load `tiktoken.model` and `tokenizer_config.json` of a Kimi K2 checkpoint.

    Args:
        directory: the checkpoint directory; config.json's `vocab_size` says how many special ids follow the ranks.

    Raises:
        ConfigError: a file is malformed, or the files contradict each other.
    """
    ranks = read_ranks(directory / "tiktoken.model")
    vocab_size = model_vocab_size(directory)
    if vocab_size is None:
        vocab_size = len(ranks) + _RESERVED
    if not len(ranks) <= vocab_size <= len(ranks) + _MOST_SPECIALS:
        raise ConfigError(f"{directory}: config.json has vocab_size {vocab_size}, tiktoken.model {len(ranks)} ranks")
    specials = declared_special_tokens(directory)
    by_name = {special.text: special.id for special in specials}
    stops = configured_stop_ids(directory, vocab_size) | {by_name[name] for name in _STOP_NAMES if name in by_name}
    return TiktokenTokenizer(ranks, specials, vocab_size, with_eos_token(directory, stops, by_name))
