"""Which documents are held out, and which of them stand too close to the training text to count."""

import hashlib
from collections.abc import Iterable, Sequence

_SHINGLE_WORDS = 8
_MAX_SHARED = 0.2  # share of a held-out document's shingles that training may hold
_OPENING = 200  # characters


def is_held_out(name: str, one_in: int) -> bool:
    """Say whether the document `name` is one of the held-out ones; depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % one_in == 0


def shingles(text: str) -> set[int]:
    """Return the hashes of all runs of eight words; equal within one process only."""
    words = text.split()
    return {hash(tuple(words[i : i + _SHINGLE_WORDS])) for i in range(len(words) - _SHINGLE_WORDS + 1)}


def far_from(training: Iterable[str], held_out: Sequence[str]) -> list[int]:
    """Return the indices of the held-out texts that training does not contain in large part."""
    of_text = [shingles(text) for text in held_out]
    wanted: set[int] = set().union(*of_text)
    seen: set[int] = set()
    for text in training:
        seen |= shingles(text) & wanted
    return [i for i, own in enumerate(of_text) if own and len(own & seen) <= _MAX_SHARED * len(own)]


def new_openings(training: Iterable[str], held_out: Sequence[str]) -> list[int]:
    """Return the indices of the held-out texts whose first 200 characters begin no training text.

    For generated text: runs of words recur by construction there, whole openings need not.
    """
    known = {text[:_OPENING] for text in training}
    return [i for i, text in enumerate(held_out) if text[:_OPENING] not in known]
