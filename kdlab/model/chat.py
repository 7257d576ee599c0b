"""Kimi K2's chat prompt: messages to token ids, their content always encoded as ordinary text."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kdlab.errors import ArgumentError, NotSupported
from kdlab.model.tokenizer import Tokenizer

_MARKERS = {"system": "<|im_system|>", "user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_MIDDLE, _END = "<|im_middle|>", "<|im_end|>"
_THINK, _THINK_END = "<think>", "</think>"
_KEYS = frozenset({"role", "content", "name", "reasoning", "reasoning_content"})
_TOOL_KEYS = frozenset({"tools", "tool_calls", "tool_call_id"})


class Piece(NamedTuple):
    """A part of a rendered prompt: a special token's name, or ordinary text."""

    text: str
    is_special: bool


def render_chat(
    messages: Sequence[Mapping[str, Any]], *, thinking: bool = True, preserve_thinking: bool = False
) -> list[Piece]:
    """Render `messages` in K2.6's format, up to the point where the assistant's next turn begins.

    There is no default system message and no begin token. Earlier assistant turns lose their reasoning (they hold an
    empty `<think></think>`) unless `preserve_thinking`.

    Args:
        messages: each with `role` (system, user, assistant), `content`, and optionally `name`; an assistant's
            `reasoning` (or `reasoning_content`) is kept with `preserve_thinking`.
        thinking: end with `<think>`, so that the model reasons first; False ends with `<think></think>`.
        preserve_thinking: keep the reasoning of earlier assistant turns.

    Raises:
        ArgumentError: there is no message, or one has an unknown role or key or a content that is no text.
        NotSupported: a message uses tools.
    """
    if isinstance(messages, str | Mapping) or not messages:
        raise ArgumentError("messages", "a list of at least one message", repr(messages))
    pieces: list[Piece] = []
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
        pieces += _render_message(message, preserve_thinking)
    pieces += _turn_head("assistant", "assistant")
    return pieces + ([Piece(_THINK, True)] if thinking else _reasoning(""))


def chat_token_ids(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    thinking: bool = True,
    preserve_thinking: bool = False,
) -> list[int]:
    """Return the token ids of `render_chat`; markers typed in a content stay text.

    Raises:
        ArgumentError: as `render_chat`, or the tokenizer lacks one of the format's special tokens.
    """
    ids: list[int] = []
    for text, is_special in render_chat(messages, thinking=thinking, preserve_thinking=preserve_thinking):
        if is_special and text not in tokenizer.special_tokens:
            raise ArgumentError("tokenizer", f"a special token {text}", f"{type(tokenizer).__name__} without it")
        ids += [tokenizer.special_tokens[text]] if is_special else tokenizer.encode(text)
    return ids


def template_hash() -> str:
    """Return a sha256 hex digest that changes whenever the rendering does, for a run's provenance."""
    probe = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q", "name": "N"},
        {"role": "assistant", "content": "A", "reasoning": "R"},
        {"role": "user", "content": "Q"},
    ]
    options = [(thinking, preserve) for thinking in (False, True) for preserve in (False, True)]
    rendered = [render_chat(probe, thinking=thinking, preserve_thinking=preserve) for thinking, preserve in options]
    return hashlib.sha256(json.dumps(rendered).encode("ascii")).hexdigest()


def _check_message(where: str, message: object) -> None:
    if not isinstance(message, Mapping):
        raise ArgumentError(where, "a mapping with role and content", repr(message))
    tools = sorted(_TOOL_KEYS & set(message))
    if tools or message.get("role") == "tool":
        raise NotSupported(where, "a message without tools", f"role {message.get('role')!r}, keys {tools}")
    unknown = sorted(map(str, set(message) - _KEYS))
    if unknown:
        raise ArgumentError(where, "the keys " + ", ".join(sorted(_KEYS)), unknown)
    if message.get("role") not in _MARKERS:
        raise ArgumentError(f"{where}: role", "one of " + ", ".join(_MARKERS), repr(message.get("role")))
    if not isinstance(message.get("content"), str):
        raise ArgumentError(f"{where}: content", "a text", repr(message.get("content")))
    for key in ("name", "reasoning", "reasoning_content"):
        if not isinstance(message.get(key), str | None):
            raise ArgumentError(f"{where}: {key}", "a text", repr(message[key]))


def _render_message(message: Mapping[str, Any], preserve_thinking: bool) -> list[Piece]:
    role = message["role"]
    pieces = _turn_head(role, message.get("name") or role)
    if role == "assistant":
        kept = message.get("reasoning") or message.get("reasoning_content") or ""
        pieces += _reasoning(kept if preserve_thinking else "")
    return [*pieces, *_ordinary(message["content"]), Piece(_END, True)]


def _turn_head(role: str, name: str) -> list[Piece]:
    return [Piece(_MARKERS[role], True), Piece(name, False), Piece(_MIDDLE, True)]


def _reasoning(text: str) -> list[Piece]:
    return [Piece(_THINK, True), *_ordinary(text), Piece(_THINK_END, True)]


def _ordinary(text: str) -> list[Piece]:
    return [Piece(text, False)] if text else []
