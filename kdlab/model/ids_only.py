"""What stands where a checkpoint ships no tokenizer: token ids go in and out, text is refused."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kdlab.checks import check_int
from kdlab.errors import ArgumentError


class TokenIdsOnly:
    """No tokenizer: prompts must be token ids, and texts show ids as `<104>`."""

    special_tokens: Mapping[str, int] = MappingProxyType({})

    def __init__(self, vocab_size: int, stop_token_ids: frozenset[int], reason: str) -> None:
        """Take the vocabulary size and stop ids of the config, and the reason that `encode` gives."""
        self.vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids
        self.reason = reason

    def encode(self, text: str) -> list[int]:
        """Refuse text.

        Raises:
            ArgumentError: always; it says where a tokenizer was looked for.
        """
        raise ArgumentError("text", f"token ids, since there is no tokenizer ({self.reason})", repr(text[:40]))

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the ids in angle brackets; there are no special tokens, so `skip_special` changes nothing."""
        return "".join(map(self.token_text, ids))

    def token_text(self, token_id: int) -> str:
        """Return one id in angle brackets."""
        return f"<{check_int('token id', token_id, minimum=0, maximum=self.vocab_size - 1)}>"
