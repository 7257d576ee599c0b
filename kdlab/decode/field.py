"""The draft field: what the drafter says at every position of the target's own text, recorded once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kdlab.checks import check_int
from kdlab.errors import ArgumentError, ShapeError


@dataclass(frozen=True, eq=False)
class PromptField:
    """The draft field of one prompt; position p is the anchor `output_ids[p]`.

    Attributes:
        prompt, prompt_id, kind: index in the recorded list, name and kind of text.
        prompt_ids: [P] int32.
        output_ids: [T] int32, new tokens, cut at the stop token (kept) or at the cap.
        tail_ids: [L + 1] int32, the target's tokens past the cut.
        num_starts: rounds may start at positions 0..num_starts-1: T at a cap, T - 1 when the last token is a stop.
        token_ids: [T, L, K] int32, the drafter's top K tokens of each of its L slots, ranked.
        log_probs: [T, L, K] float32, their log-probabilities, nats at temperature 1, descending; NaN rows are unusable.
        next_log_prob: [T, L] float32, the draft's log-probability of the token the target wrote at p + 1 + l.
        next_rank: [T, L] int32, 0-based rank of that token in the draft's whole vocabulary.
    """

    prompt: int
    prompt_id: str
    kind: str
    prompt_ids: np.ndarray
    output_ids: np.ndarray
    tail_ids: np.ndarray
    num_starts: int
    token_ids: np.ndarray
    log_probs: np.ndarray
    next_log_prob: np.ndarray
    next_rank: np.ndarray

    def __repr__(self) -> str:
        shape = f"num_positions={len(self.output_ids)}, num_starts={self.num_starts}"
        return f"PromptField(prompt={self.prompt}, prompt_id={self.prompt_id!r}, kind={self.kind!r}, {shape})"

    @property
    def all_ids(self) -> np.ndarray:
        """[T + L + 1] int32: the output and its tail."""
        return np.concatenate([self.output_ids, self.tail_ids])

    @property
    def next_ids(self) -> np.ndarray:
        """[T, L] int32: the tokens the target wrote at p + 1 + l."""
        return following(self.all_ids, *self.next_rank.shape)


def following(all_ids: np.ndarray, num_positions: int, depth_limit: int) -> np.ndarray:
    """Return the tokens behind each position.

    Args:
        all_ids: [num_positions + depth_limit or more] int, an output and its tail.
        num_positions: positions T.
        depth_limit: L.

    Returns:
        [T, L], token p + 1 + l at [p, l], in the dtype of `all_ids`.
    """
    return all_ids[np.arange(num_positions)[:, None] + 1 + np.arange(depth_limit)]


@dataclass(frozen=True, eq=False)
class DraftField:
    """Draft fields of a prompt list, and how they were recorded.

    Attributes:
        prompts: one PromptField a prompt.
        top_k: K, the draft candidates kept a slot.
        vocab_size: V; with K = V no tree of any budget is truncated.
        depth_limit: L = block size - 1.
        provenance: where, when and with what settings and bytes it was recorded.

    Raises:
        ArgumentError: a number, shape, token or rank of a prompt does not fit the others; ShapeError for shapes.
    """

    prompts: list[PromptField]
    top_k: int
    vocab_size: int
    depth_limit: int
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("top_k", self.top_k), ("vocab_size", self.vocab_size), ("depth_limit", self.depth_limit)):
            check_int(name, value, minimum=1)
        if not isinstance(self.provenance, Mapping):
            raise ArgumentError("provenance", "a mapping", repr(self.provenance))
        for prompt in self.prompts:
            _check_prompt(prompt, self.depth_limit, self.top_k, self.vocab_size)

    def __repr__(self) -> str:
        counts = f"num_prompts={len(self.prompts)}, num_positions={sum(len(p.output_ids) for p in self.prompts)}"
        return f"DraftField({counts}, depth_limit={self.depth_limit}, top_k={self.top_k}, vocab_size={self.vocab_size})"

    @property
    def whole_vocabulary(self) -> bool:
        """True when every token of the vocabulary was kept, so that budgets above K stay exact."""
        return self.top_k >= self.vocab_size


def _check_prompt(prompt: PromptField, depth_limit: int, top_k: int, vocab_size: int) -> None:
    where = f"prompt {prompt.prompt_id!r}: "
    length = len(prompt.output_ids)
    shapes = {"output_ids": (length,), "tail_ids": (depth_limit + 1,), "token_ids": (length, depth_limit, top_k)}
    shapes |= {"log_probs": shapes["token_ids"], "next_log_prob": (length, depth_limit)}
    shapes |= {"next_rank": shapes["next_log_prob"]}
    for name, shape in shapes.items():
        array = getattr(prompt, name)
        if array.shape != shape:
            raise ShapeError(where + name, str(list(shape)), list(array.shape))
    check_int(where + "prompt", prompt.prompt, minimum=0)
    check_int(where + "num_starts", prompt.num_starts, minimum=0, maximum=length)
    for name in ("output_ids", "tail_ids", "token_ids", "next_rank"):
        array = getattr(prompt, name)
        if array.dtype.kind not in "iu":
            raise ShapeError(where + name, "integers", array.dtype)
        if array.size:
            check_int(where + name, array.min(), minimum=0)
            check_int(where + name, array.max(), maximum=vocab_size - 1)
