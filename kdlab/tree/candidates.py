"""The draft's candidates, checked and sorted once for every builder, on the host: a GPU's are copied there first."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import MAX_TOKEN, check_int, check_integer_tensor, check_shape
from kdlab.errors import ArgumentError, ShapeError
from kdlab.tree.draft_tree import DraftTree, assemble
from kdlab.tree.pack import Nodes, pack_nodes

# A log-probability is at most 0; `logit - logsumexp` in float32 may round to a little more.
POSITIVE_TOLERANCE = 1e-4
MASS_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Sorted candidates of S streams. A row is usable if all rows before it and it itself are free of faults."""

    log_probs: np.ndarray  # [S, L, K] f64, nats, descending, at most 0 (-inf: never a node)
    token_ids: np.ndarray  # [S, L, K] i64
    num_usable: np.ndarray  # [S, L] candidates that may become nodes, 0 from the first faulty row on
    missed_mass: np.ndarray  # [S, L] f32, 1 for faulty rows
    nonfinite_rows: np.ndarray  # [S] i32
    whole_vocabulary: np.ndarray  # [S] bool
    device: torch.device

    def rows(self, stream: int, width: int) -> tuple[list[list[float]], list[list[int]]]:
        """Return log-probabilities and token ids of the usable depths, at most `width` a depth, as lists."""
        counts = self.num_usable[stream]
        depth = int(np.count_nonzero(counts))
        scores = self.log_probs[stream, :depth, :width].tolist()
        tokens = self.token_ids[stream, :depth, :width].tolist()
        limits = counts[:depth].tolist()
        return (
            [row[:count] for row, count in zip(scores, limits, strict=True)],
            [row[:count] for row, count in zip(tokens, limits, strict=True)],
        )

    def to_tree(self, streams: Sequence[Nodes], capacity: int, width: int) -> DraftTree:
        """Return the grown `streams` as a DraftTree, truncated where a row should have had `width` candidates."""
        num_streams, depth_limit, num_given = self.log_probs.shape
        short = num_given < width and depth_limit > 0
        truncated = ~self.whole_vocabulary if short else np.zeros(num_streams, dtype=bool)
        return assemble(
            pack_nodes(streams, capacity, self.device),
            depth_limit=depth_limit,
            missed_mass=torch.from_numpy(self.missed_mass),
            truncated=torch.from_numpy(truncated),
            nonfinite_rows=torch.from_numpy(self.nonfinite_rows),
        )


def read_candidates(log_probs: Tensor, token_ids: Tensor, vocab_size: int | None) -> Candidates:
    """Check, sort and count the candidates that a drafter gives.

    Args:
        log_probs: [S, L, K] float, nats, any order; equal entries keep the given order.
        token_ids: [S, L, K] int, distinct within a row.
        vocab_size: size of the vocabulary; None takes the candidates for the whole of it only if they show it, by
            ids 0..K-1 in every row and a mass of 1.

    Returns:
        The sorted candidates. Log-probabilities above 0 by rounding count as 0, so that no node outranks its parent.

    Raises:
        ArgumentError: a positive log-probability, a token id out of range or twice in a row; the place is named.
    """
    _check_inputs(log_probs, token_ids)
    limit = MAX_TOKEN + 1 if vocab_size is None else check_int("vocab_size", vocab_size, minimum=1)
    given = log_probs.detach().to("cpu", torch.float64).numpy()
    order = np.argsort(-given, axis=-1, kind="stable")
    scores = np.take_along_axis(given, order, axis=-1)
    tokens = np.take_along_axis(token_ids.detach().to("cpu", torch.int64).numpy(), order, axis=-1)
    good = _good_rows(scores)
    valid = good[..., None] & (scores > -np.inf)
    _refuse("log_probs", scores, valid & (scores > POSITIVE_TOLERANCE), order, "log-probabilities, at most 0")
    _refuse("token_ids", tokens, valid & ((tokens < 0) | (tokens >= limit)), order, f"ids from 0 to {limit - 1}")
    _refuse("token_ids", tokens, _repeats(tokens, valid), order, "distinct ids in a row")
    mass = np.exp(scores).sum(axis=-1)
    usable = np.logical_and.accumulate(good, axis=-1)
    return Candidates(
        log_probs=np.minimum(scores, 0.0),
        token_ids=tokens,
        num_usable=np.where(usable, valid.sum(axis=-1), 0),
        missed_mass=np.where(good, np.maximum(1.0 - mass, 0.0), 1.0).astype(np.float32),
        nonfinite_rows=(~good).sum(axis=-1, dtype=np.int32) * np.int32(scores.shape[-1] > 0),
        whole_vocabulary=_whole_vocabulary(tokens, mass, vocab_size),
        device=log_probs.device,
    )


def _check_inputs(log_probs: Tensor, token_ids: Tensor) -> None:
    check_shape("log_probs", log_probs, ["S", "L", "K"])
    check_shape("token_ids", token_ids, list(log_probs.shape))
    if not log_probs.is_floating_point():
        raise ShapeError("log_probs", "a float dtype", log_probs.dtype)
    check_integer_tensor("token_ids", token_ids)


def _good_rows(scores: np.ndarray) -> np.ndarray:
    """Return [S, L] bool: no NaN (they sort last), no +inf (it sorts first), something finite."""
    if scores.shape[-1] == 0:
        return np.zeros(scores.shape[:2], dtype=bool)
    return np.isfinite(scores[..., 0]) & ~np.isnan(scores[..., -1])


def _repeats(tokens: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Return [S, L, K] bool: the id stands earlier in the row too."""
    distinct = np.where(valid, tokens, -1 - np.arange(tokens.shape[-1]))
    order = np.argsort(distinct, axis=-1, kind="stable")
    ids = np.take_along_axis(distinct, order, axis=-1)
    repeats = np.zeros(tokens.shape, dtype=bool)
    np.put_along_axis(repeats, order[..., 1:], ids[..., 1:] == ids[..., :-1], axis=-1)
    return repeats


def _refuse(name: str, values: np.ndarray, bad: np.ndarray, order: np.ndarray, expected: str) -> None:
    if bad.any():
        stream, row, place = (int(index) for index in np.argwhere(bad)[0])
        where = f"{name}[{stream}, {row}, {int(order[stream, row, place])}]"
        raise ArgumentError(where, expected, values[stream, row, place])


def _whole_vocabulary(tokens: np.ndarray, mass: np.ndarray, vocab_size: int | None) -> np.ndarray:
    """Return [S] bool: the candidates are known to be the whole vocabulary."""
    if vocab_size is not None:
        return np.full(tokens.shape[0], tokens.shape[-1] >= vocab_size)
    counted = (np.sort(tokens, axis=-1) == np.arange(tokens.shape[-1])).all(axis=-1)
    return (counted & (np.abs(mass - 1.0) <= MASS_TOLERANCE)).all(axis=-1)
