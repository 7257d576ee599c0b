"""`python -m kdlab.mini.token_files`: trains the tokenizer and writes the text as token ids, small enough to carry."""

import argparse
import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers

from kdlab.errors import ArgumentError
from kdlab.mini.corpus import KINDS, SEPARATOR
from kdlab.mini.tokenizer import SPECIAL, VOCAB_SIZE, save_tokenizer, train_tokenizer

_BATCH = 256  # documents encoded at once


def encode(tokenizer: tokenizers.Tokenizer, documents: Iterable[str]) -> np.ndarray:
    """Return all documents as one [n] uint16 array, [EOS] behind each.

    Documents that spell out a special token are left out: sources about tokenizers do, and it would be trained as one.
    """
    eos = tokenizer.token_to_id("[EOS]")
    documents = (text for text in documents if not any(name in text for name in SPECIAL))
    pieces = []
    for batch in _batches(documents, _BATCH):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            pieces.append(np.array([*encoding.ids, eos], dtype=np.uint16))
    return np.concatenate(pieces)


def _batches(items: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def write_tokens(path: Path, tokens: np.ndarray) -> None:
    """Write [n] uint16 as little-endian bytes, xz-compressed."""
    with lzma.open(path, "wb", preset=6) as file:
        file.write(tokens.astype("<u2").tobytes())


def read_tokens(path: Path) -> np.ndarray:
    """Return the [n] uint16 tokens of a file that `write_tokens` wrote.

    Raises:
        ArgumentError: there is no such file.
    """
    if not path.is_file():
        raise ArgumentError("tokens", "a file that kdlab.mini.token_files wrote", path)
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2").astype(np.uint16)


def write_all(text: Path, out: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Train the tokenizer on `text` and write it and the tokens of every kind to `out`."""
    tokenizer = train_tokenizer(text, vocab_size)
    save_tokenizer(tokenizer, out / "tokenizer")
    for kind in KINDS:
        training = (text / f"{kind}.train.txt").read_text(encoding="utf-8").split(SEPARATOR)
        lines = (text / f"{kind}.held-out.jsonl").read_text(encoding="utf-8").splitlines()
        parts = {"train": training, "held-out": [json.loads(line)["text"] for line in lines]}
        for part, documents in parts.items():
            tokens = encode(tokenizer, documents)
            path = out / f"{kind}.{part}.u16.xz"
            write_tokens(path, tokens)
            print(f"{path.name}: {len(tokens) / 1e6:.2f} M tokens, {path.stat().st_size / 1e6:.1f} MB", flush=True)


def main() -> None:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(".mini/text"))
    parser.add_argument("--out", type=Path, default=Path(".mini/tokens"))
    args = parser.parse_args()
    write_all(args.text, args.out)


if __name__ == "__main__":
    main()
