"""Prompts as text or token ids, and sets of them that carry a digest of their content."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdlab.checks import check_int
from kdlab.errors import ArgumentError
from kdlab.model.tokenizer import Tokenizer

_KEYS = ("id", "kind", "text", "token_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: either `text`, or `token_ids`; `kind` groups prompts in tables."""

    id: str
    kind: str = "text"
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in (("id", self.id), ("kind", self.kind)):
            if not isinstance(value, str) or not value:
                raise ArgumentError(f"prompt {self.id!r}: {name}", "a text that is not empty", repr(value))
        if (self.text is None) == (self.token_ids is None):
            got = "neither" if self.text is None else "both"
            raise ArgumentError(f"prompt {self.id!r}", "either text or token_ids", got)
        if self.text is not None and (not isinstance(self.text, str) or not self.text):
            raise ArgumentError(f"prompt {self.id!r}: text", "a text that is not empty", repr(self.text))
        if self.token_ids is not None:
            object.__setattr__(self, "token_ids", _checked_ids(f"prompt {self.id!r}: token_ids", self.token_ids))


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts in order; `digest` is the sha256 of their content, so equal digests mean equal prompts."""

    id: str
    digest: str
    prompts: tuple[Prompt, ...]

    @classmethod
    def of(cls, set_id: str, prompts: Sequence[Prompt]) -> "PromptSet":
        """Make a set of `prompts`, at least one, with distinct ids.

        Raises:
            ArgumentError: there is no prompt, or an id comes twice.
        """
        if not prompts:
            raise ArgumentError("prompts", "at least one prompt", "none")
        seen: set[str] = set()
        for index, prompt in enumerate(prompts):
            if prompt.id in seen:
                raise ArgumentError(f"prompts[{index}]", "a new id", f"{prompt.id!r} again")
            seen.add(prompt.id)
        return cls(set_id, prompts_digest(prompts), tuple(prompts))

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return the sha256 hex digest over id, kind, text and token ids of `prompts`, in order."""
    content = [[prompt.id, prompt.kind, prompt.text, prompt.token_ids] for prompt in prompts]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode("ascii")).hexdigest()


def load_prompts(path: str | Path) -> PromptSet:
    """Load a JSON-lines file: a line holds `id`, `kind`, and either `text` or `token_ids`; blank lines are skipped.

    Args:
        path: the file; its stem becomes the set's id.

    Raises:
        ArgumentError: the file is missing, holds no prompt, or a line is wrong (file and line number are named).
    """
    if not isinstance(path, str | Path) or not os.path.isfile(path):
        raise ArgumentError("prompts", "an existing file", path)
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(str(path), "UTF-8", error) from error
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        prompt = _parse_line(where, line)
        if prompt.id in prompts:
            raise ArgumentError(where, "a new id", f"{prompt.id!r} again")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ArgumentError(str(path), "at least one prompt", "none")
    return PromptSet.of(path.stem, list(prompts.values()))


def _parse_line(where: str, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(where, "a JSON object", f"{line.strip()[:60]!r} ({error})") from error
    if not isinstance(value, dict):
        raise ArgumentError(where, "a JSON object", type(value).__name__)
    missing = [key for key in ("id", "kind") if key not in value]
    unknown = sorted(set(value) - set(_KEYS))
    if missing or unknown:
        found = {"missing": missing, "unknown": unknown}
        got = ", ".join(f"{word} {keys}" for word, keys in found.items() if keys)
        raise ArgumentError(where, "the keys id, kind, and text or token_ids", got)
    try:
        return Prompt(value["id"], value["kind"], value.get("text"), value.get("token_ids"))
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error.argument}", error.expected, error.got) from error


def as_prompt_set(prompts: object) -> PromptSet:
    """Turn what a user may pass for prompts into a PromptSet.

    Args:
        prompts: a text, a Prompt, a PromptSet (returned as it is), a list of token ids, or a list whose items are
            texts, Prompts or lists of token ids. Arrays and tensors of ids count as lists. Texts and ids are named "0",
            "1" and so on, a new set "unnamed".

    Raises:
        ArgumentError: nothing was passed, an item is empty or of another type, or an id comes twice.
    """
    if isinstance(prompts, PromptSet):
        return prompts
    items = [prompts] if isinstance(prompts, str | Prompt) else _as_list(prompts)
    if items is None:
        raise ArgumentError("prompts", "a text, token ids, a Prompt, or a list of these", type(prompts).__name__)
    if items and _is_id(items[0]):
        items = [items]
    return PromptSet.of("unnamed", [_as_prompt(index, item) for index, item in enumerate(items)])


def prompt_token_ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of `prompt` under `tokenizer`.

    Raises:
        ArgumentError: the text cannot be encoded, or an id lies outside the vocabulary.
    """
    if prompt.token_ids is None:
        try:
            return tokenizer.encode(prompt.text or "")
        except ArgumentError as error:
            raise ArgumentError(f"prompt {prompt.id!r}: {error.argument}", error.expected, error.got) from error
    for token in prompt.token_ids:
        check_int(f"prompt {prompt.id!r}: token id", token, minimum=0, maximum=tokenizer.vocab_size - 1)
    return list(prompt.token_ids)


def _is_id(value: object) -> bool:
    # An array or tensor has __index__ whatever its size; only one without axes is a single id.
    return hasattr(value, "__index__") and not getattr(value, "shape", ())


def _as_list(value: object) -> list[Any] | None:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple | range) else None


def _as_prompt(index: int, item: object) -> Prompt:
    if isinstance(item, Prompt):
        return item
    if isinstance(item, str):
        return Prompt(str(index), text=item)
    ids = _as_list(item)
    if ids is None:
        raise ArgumentError(f"prompts[{index}]", "a text, a Prompt or a list of token ids", repr(item))
    return Prompt(str(index), token_ids=tuple(ids))


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    values = _as_list(ids)
    if not values:
        raise ArgumentError(name, "a list of token ids that is not empty", repr(ids))
    return tuple(check_int(f"{name}[{index}]", value, minimum=0) for index, value in enumerate(values))
