"""A corpus small enough to train on within seconds."""

import json
import random
from pathlib import Path

import pytest

from kdlab.mini.archives import clean_code
from kdlab.mini.corpus import KINDS, SEPARATOR
from kdlab.mini.math_text import math_document
from kdlab.mini.shape import SMOKE
from kdlab.mini.structured_text import structured_document
from kdlab.mini.token_files import write_all

_SOURCES = ("model/target.py", "model/moe.py", "tree/build.py", "decode/engine.py", "kernels/mla.py", "config.py")


def _documents(kind: str) -> list[str]:
    rng = random.Random(kind)
    root = Path(__file__).resolve().parents[2] / "kdlab"
    files = [(root / name).read_text(encoding="utf-8") for name in _SOURCES]
    if kind == "code":
        return [clean_code(text) for text in files]
    if kind == "prose":
        return [" ".join(line.strip(' "#') for line in text.splitlines() if line.count(" ") > 8) for text in files]
    make = math_document if kind == "math" else structured_document
    return [make(rng) for _ in range(60)]


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens and tokenizer of a small corpus of all kinds, at the smoke shape's vocabulary."""
    root = tmp_path_factory.mktemp("mini")
    text = root / "text"
    text.mkdir()
    for kind in KINDS:
        documents = _documents(kind)
        (text / f"{kind}.train.txt").write_text(SEPARATOR.join(documents[:-1]), encoding="utf-8")
        (text / f"{kind}.held-out.jsonl").write_text(json.dumps({"name": kind, "text": documents[-1]}) + "\n")
    write_all(text, root / "tokens", SMOKE.vocab_size)
    return root / "tokens"
