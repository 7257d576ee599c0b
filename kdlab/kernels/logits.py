"""Ops on logits in plain torch: the draft's top K, and the target's draw at every row."""

from typing import NamedTuple

import torch
from torch import Tensor

from kdlab.checks import check_int, check_shape
from kdlab.kernels.philox import gumbel_noise


class TopK(NamedTuple):
    """The best K draft candidates of every draft position."""

    log_probs: Tensor  # [S, L, K] float32, nats, descending; NaN in a row that was not finite
    token_ids: Tensor  # [S, L, K] int32
    nonfinite: Tensor  # [S, L] bool, the row held NaN or +inf, or nothing above -inf


def draft_topk(logits: Tensor, k: int) -> TopK:
    """Best K tokens of every draft row with their log-probabilities; exact ties go to the smaller id.

    Args:
        logits: [S, L, V] any float dtype.
        k: 1 <= K <= V.
    Returns: TopK; a row that holds NaN or +inf, or -inf alone, is flagged and its log-probabilities are NaN.
    Raises: ShapeError, ArgumentError (argument, expected, got).
    """
    vocab_size = check_shape("logits", logits, ("S", "L", "V"))["V"]
    k = check_int("k", k, minimum=1, maximum=vocab_size)
    nonfinite = _unusable(logits)
    values = torch.where(nonfinite[..., None], 0.0, logits.double())
    ranked, token_ids = values.sort(dim=-1, descending=True, stable=True)
    log_probs = ranked[..., :k] - values.logsumexp(dim=-1, keepdim=True)
    log_probs = torch.where(nonfinite[..., None], torch.nan, log_probs)
    return TopK(log_probs.float(), token_ids[..., :k].int(), nonfinite)


def target_sample(
    logits: Tensor, *, temperature: float, top_p: float, seed: int, stream: Tensor, position: Tensor
) -> Tensor:
    """Draw the target's token at every row.

    Greedy is the argmax; at temperature T > 0 it is argmax(log p / T + Gumbel noise) over the top-p set. The noise is
    keyed by (seed, stream, position, token id), so a position gets the same token whatever the tree, the batch or the
    rank that draws it. The top-p set is the smallest that reaches mass top_p at that temperature.

    Args:
        logits: [S, N, V] any float dtype.
        temperature: >= 0; 0 is greedy, exact ties go to the smaller id.
        top_p: 0 < top_p <= 1.
        seed: 0 <= seed < 2^64.
        stream: [S] int64, index of the prompt.
        position: [S, N] int64, absolute position of the token that is drawn.
    Returns: [S, N] int32; -1 where the row held NaN or +inf, or nothing above -inf.
    """
    bad = _unusable(logits)
    if temperature == 0.0:
        tokens = logits.argmax(dim=-1)
    else:
        scaled = torch.where(bad[..., None], 0.0, logits.double()) / temperature
        noise = gumbel_noise(seed, stream, position, logits.shape[-1])
        tokens = (_keep_top_p(scaled, top_p) + noise).argmax(dim=-1)
    return torch.where(bad, -1, tokens).int()


def _keep_top_p(scaled: Tensor, top_p: float) -> Tensor:
    """Put -inf outside the smallest set of tokens, taken from the most probable down, that holds mass top_p."""
    if top_p >= 1.0:
        return scaled
    ranked, token_ids = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    dropped = ranked.cumsum(dim=-1) - ranked >= top_p
    return scaled.masked_fill(torch.zeros_like(dropped).scatter(-1, token_ids, dropped), -torch.inf)


def _unusable(logits: Tensor) -> Tensor:
    """[...] bool: the row of [..., V] holds NaN or +inf, or nothing above -inf."""
    top = logits.amax(dim=-1)
    return ~torch.isfinite(top)
