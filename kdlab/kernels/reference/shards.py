"""The ops over logits, one vocabulary shard at a time, in plain torch: what each rank does between two exchanges."""

from typing import NamedTuple

import torch
from torch import Tensor

from kdlab.kernels.mla import compute_dtype
from kdlab.kernels.philox import gumbel_noise
from kdlab.kernels.reference.ops import rank_top


class TopKShard(NamedTuple):
    """The best K tokens of one vocabulary shard at every draft position; `merge_topk` makes a TopK of all shards'."""

    values: Tensor  # [S, L, K] float32 (float64 for such logits), descending; -inf where the shard has fewer tokens
    token_ids: Tensor  # [S, L, K] int32, global; -1 where the shard has fewer tokens
    lse: Tensor  # [S, L] float64, nats, log-sum-exp of the shard; -inf where it has nothing above -inf
    nonfinite: Tensor  # [S, L] bool, the shard's row held NaN or +inf


def draft_topk_shard(logits: Tensor, k: int, first_id: int) -> TopKShard:
    """Best K tokens of a shard without padding columns; exact ties go to the smaller id.

    Args:
        logits: [S, L, Vs] any float dtype.
        k: at least 1; it may be larger than Vs.
        first_id: the global id of column 0.
    """
    num_ids = logits.shape[-1]
    nonfinite = ~(logits < torch.inf).all(dim=-1)
    values = torch.where(nonfinite[..., None], 0.0, logits.double())
    top, token_ids = rank_top(values, min(k, num_ids))
    top = torch.where(nonfinite[..., None], torch.nan, top).to(compute_dtype(logits.dtype))
    missing = (0, k - top.shape[-1])
    return TopKShard(
        torch.nn.functional.pad(top, missing, value=-torch.inf),
        torch.nn.functional.pad(token_ids.int() + first_id, missing, value=-1),
        torch.where(nonfinite, torch.nan, values.logsumexp(dim=-1)),
        nonfinite,
    )


class SampleShard(NamedTuple):
    """Tokens of a vocabulary shard (or of all shards, merged) that may be the draw: F = 1 without top-p.

    Candidates come by falling score and rising probability: each is the best of all tokens more probable than the one
    before it. Whatever the top-p set is, the draw is the first candidate that it holds.
    """

    scores: Tensor  # [S, N, F] float64, logit / T + noise, the logit where greedy; -inf behind the last candidate
    token_ids: Tensor  # [S, N, F] int32, global; -1 behind the last candidate
    values: Tensor  # [S, N, F] float32 (float64 for such logits), logits; -inf behind the last candidate
    top: Tensor  # [S, N] as values, the largest logit; NaN where the row held NaN or +inf


def target_sample_shard(
    logits: Tensor,
    first_id: int,
    capacity: int,
    *,
    temperature: float,
    seed: int,
    stream: Tensor,
    position: Tensor,
) -> SampleShard:
    """Candidates of a shard without padding columns.

    Args:
        logits: [S, N, Vs] any float dtype.
        first_id: the global id of column 0.
        capacity: F; 1 keeps the best alone.
        temperature, seed, stream, position: as for `reference.target_sample`.
    """
    values = logits if logits.dtype == torch.float64 else logits.float()
    values = torch.nn.functional.pad(values, (0, capacity), value=-torch.inf)  # a shard may have no column
    top = values.amax(dim=-1)
    bad = ~(top < torch.inf)
    values = torch.where(bad[..., None], -torch.inf, values)
    scores = values.double()
    if temperature > 0.0:
        noise = gumbel_noise(seed, stream, position, values.shape[-1], first_id=first_id)
        scores = scores / temperature + noise
    values, order = values.sort(dim=-1, descending=True, stable=True)
    scores = scores.gather(-1, order)
    best_before = torch.nn.functional.pad(scores.cummax(dim=-1).values[..., :-1], (1, 0), value=-torch.inf)
    # Where the candidates stand, the least probable first, then everything else in any order.
    places = torch.arange(values.shape[-1], device=values.device)
    last = torch.where(scores > best_before, places, -1).topk(capacity, dim=-1).values
    found, places = last >= 0, last.clamp(min=0)
    return SampleShard(
        torch.where(found, scores.gather(-1, places), -torch.inf),
        torch.where(found, order.gather(-1, places).int() + first_id, -1),
        torch.where(found, values.gather(-1, places), -torch.inf),
        torch.where(bad, torch.nan, top),
    )


def top_p_mass_shard(logits: Tensor, candidates: SampleShard, first_id: int, *, temperature: float) -> Tensor:
    """Mass of a shard above each candidate, relative to the most probable token of all shards.

    Args:
        logits: [S, N, Vs] any float dtype.
        candidates: merged over all shards.
        first_id: the global id of column 0.
        temperature: above 0.

    Returns:
        [S, N, F + 1] float64; the last entry is all mass of the shard.
    """
    values = logits.double()
    mass = ((values - candidates.top[..., None].double()) / temperature).exp()
    ids = torch.arange(values.shape[-1], device=values.device) + first_id
    sums = []
    for value, token_id in zip(candidates.values.double().unbind(-1), candidates.token_ids.unbind(-1), strict=True):
        equal = (values == value[..., None]) & (ids < token_id[..., None])
        sums.append(torch.where((values > value[..., None]) | equal, mass, 0.0).sum(dim=-1))
    return torch.stack([*sums, mass.sum(dim=-1)], dim=-1)
