"""`python -m kdlab.mini.corpus`: builds the text of all four kinds on the CPU, with the held-out part set aside."""

import argparse
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kdlab.mini.archives import Document, code_documents, rst_documents, usable_code, usable_prose
from kdlab.mini.held_out import far_from, is_held_out, new_openings
from kdlab.mini.html_prose import html_documents
from kdlab.mini.licences import admitted, archive_licence
from kdlab.mini.math_text import math_document
from kdlab.mini.structured_text import structured_document

KINDS = ("code", "math", "structured", "prose")
SEPARATOR = "\0"
_HELD_OUT_ONE_IN = {"code": 80, "prose": 30}
_HELD_OUT_GENERATED = 600
_GENERATED = {"math": math_document, "structured": structured_document}


@dataclass
class Text:
    """Documents of one kind: for training, and held out."""

    training: list[str] = field(default_factory=list)
    held_out: list[Document] = field(default_factory=list)


def collect(documents: Iterator[Document], usable: Callable[[str], bool], one_in: int, limit: int) -> Text:
    """Split usable documents that are not exact copies, up to `limit` characters of them."""
    text, seen, size = Text(), set(), 0
    for name, body in documents:
        digest = hashlib.sha256(body.encode()).digest()
        if digest in seen or not usable(body):
            continue
        seen.add(digest)
        size += len(body)
        if is_held_out(name, one_in):
            text.held_out.append((name, body))
        else:
            text.training.append(body)
        if size > limit:
            break
    return text


def generate(kind: str, characters: int) -> Text:
    """Generate documents of `kind` until training holds `characters` characters; the held-out ones come first."""
    rng, text = random.Random(f"kimi-k26-mini {kind}"), Text()
    make = _GENERATED[kind]
    text.held_out = [(f"{kind}-{i}", make(rng)) for i in range(_HELD_OUT_GENERATED)]
    held, size = {body for _, body in text.held_out}, 0
    while size < characters:
        body = make(rng)
        if body not in held:
            text.training.append(body)
            size += len(body)
    return text


def build(downloads: Path, out: Path, *, code_chars: int, generated_chars: int) -> None:
    """Build all kinds from the archives in `downloads` into `out`.

    Args:
        downloads: holds wheels/, sdists/ and html/ (the unpacked python3.11-doc).
        out: gets KIND.train.txt, KIND.held-out.jsonl and sources.jsonl.
        code_chars: characters of code to take.
        generated_chars: characters to generate of math and of structured text, each.
    """
    out.mkdir(parents=True, exist_ok=True)
    wheels, sdists = _admitted(downloads / "wheels"), _admitted(downloads / "sdists")
    _write_sources(out, wheels + sdists)
    pages = itertools.chain(html_documents(downloads / "html"), rst_documents(sdists))
    rng = random.Random(0)
    sources = {
        "code": lambda: collect(code_documents(wheels), usable_code, _HELD_OUT_ONE_IN["code"], code_chars),
        "prose": lambda: collect(pages, usable_prose, _HELD_OUT_ONE_IN["prose"], code_chars),
        "math": lambda: generate("math", generated_chars),
        "structured": lambda: generate("structured", generated_chars),
    }
    for kind, make in sources.items():
        text = make()
        apart = new_openings if kind in _GENERATED else far_from
        kept = apart(text.training, [body for _, body in text.held_out])
        rng.shuffle(text.training)
        (out / f"{kind}.train.txt").write_text(SEPARATOR.join(text.training), encoding="utf-8")
        lines = [json.dumps({"name": text.held_out[i][0], "text": text.held_out[i][1]}) for i in kept]
        (out / f"{kind}.held-out.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        size = sum(map(len, text.training))
        print(
            f"{kind}: {len(text.training)} documents, {size / 1e6:.1f} M characters; "
            f"held out {len(kept)} of {len(text.held_out)} (the others stand too close to the training text)",
            flush=True,
        )


def _admitted(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if admitted(archive_licence(path))]


def _write_sources(out: Path, archives: list[Path]) -> None:
    lines = []
    for path in archives:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(json.dumps({"file": path.name, "licence": archive_licence(path), "sha256": digest}))
    (out / "sources.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--downloads", type=Path, required=True, help="what kdlab.mini.fetch fetched")
    parser.add_argument("--out", type=Path, default=Path(".mini/text"))
    parser.add_argument("--code-chars", type=float, default=240e6)
    parser.add_argument("--generated-chars", type=float, default=45e6)
    args = parser.parse_args()
    build(args.downloads, args.out, code_chars=int(args.code_chars), generated_chars=int(args.generated_chars))


if __name__ == "__main__":
    main()
