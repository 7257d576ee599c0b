"""`python -m kdlab.mini.make_prompts`: cuts the held-out prompts of every kind out of the held-out documents."""

import argparse
import json
import random
from pathlib import Path

from kdlab.errors import ArgumentError
from kdlab.mini.corpus import KINDS

PER_KIND = 24
_SHORTEST, _LONGEST = 250, 700  # characters, code and prose


def code_prompt(text: str, rng: random.Random) -> str | None:
    """Return the head of a file up to the end of a line inside a function, or None where there is none in reach."""
    lines, size, ends = text.split("\n"), 0, []
    for i, line in enumerate(lines[:-1]):
        size += len(line) + 1
        above = lines[max(0, i - 6) : i]
        inside = line.startswith("    ") and any(other.lstrip().startswith("def ") for other in above)
        if _SHORTEST <= size <= _LONGEST and inside and line.strip() and '"""' not in line:
            ends.append(size)
    return text[: rng.choice(ends)] if ends else None


def prose_prompt(text: str, rng: random.Random) -> str | None:
    """Return a stretch from the start of a paragraph to the middle of a sentence of a later one."""
    begins = [i + 2 for i in range(len(text) - 2 * _LONGEST) if text.startswith("\n\n", i) and text[i + 2].isupper()]
    if not begins:
        return None
    begin = rng.choice(begins)
    end = text.find(" ", begin + rng.randint(_SHORTEST, _LONGEST))
    return text[begin:end] if end > 0 and text[begin:end].count("\n") < 12 else None


def math_prompt(text: str, rng: random.Random) -> str | None:
    """Return the problem, ready for its solution."""
    head, found, _ = text.partition("Solution:\n")
    return head + found if found else None


def structured_prompt(text: str, rng: random.Random) -> str | None:
    """Return the first part of a document: the source of a conversion, else the lines of its first third."""
    if text.startswith("Convert"):
        result = text.split("\n", 1)[0].split(" to ")[-1].rstrip(".")
        head, found, _ = text.partition(f"\n\n{result}:\n")
        return head + found
    lines = text.split("\n")
    head = "\n".join(lines[: max(2, len(lines) // 3)]) + "\n"
    return head if 60 <= len(head) <= _LONGEST else None


_CUTS = {"code": code_prompt, "math": math_prompt, "structured": structured_prompt, "prose": prose_prompt}


def cut_prompts(kind: str, documents: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    """Return `count` prompts of `kind`, spread over the held-out documents.

    Raises:
        ArgumentError: the documents give fewer.
    """
    rng = random.Random(f"prompts {kind}")
    order = rng.sample(documents, len(documents))
    found: list[dict[str, str]] = []
    # Prose pages are few and long: each may be cut more than once.
    for document in order * (3 if kind == "prose" else 1):
        text = _CUTS[kind](document["text"], rng)
        if text is not None and all(text != other["text"] for other in found):
            found.append({"id": f"{kind}-{len(found):02d}", "kind": kind, "text": text})
        if len(found) == count:
            return found
    raise ArgumentError("documents", f"text for {count} prompts of {kind}", len(found))


def main() -> None:
    """Read the command line and write one file a kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(".mini/text"))
    parser.add_argument("--out", type=Path, default=Path("data/prompts"))
    args = parser.parse_args()
    for kind in KINDS:
        lines = (args.text / f"{kind}.held-out.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = cut_prompts(kind, [json.loads(line) for line in lines], PER_KIND)
        body = "\n".join(json.dumps(prompt) for prompt in prompts)
        (args.out / f"{kind}.jsonl").write_text(body + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
