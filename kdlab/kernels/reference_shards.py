"""The ops over logits, one vocabulary shard at a time, in plain torch: what each rank does between two exchanges."""

from typing import NamedTuple

import torch
from torch import Tensor

from kdlab.kernels.reference import rank_top


class TopKShard(NamedTuple):
    """The best K tokens of one vocabulary shard at every draft position; `merge_topk` makes a TopK of all shards'."""

    values: Tensor  # [S, L, K] float32, logits, descending; -inf where the shard has fewer tokens
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
    top = torch.where(nonfinite[..., None], torch.nan, top).float()
    missing = (0, k - top.shape[-1])
    return TopKShard(
        torch.nn.functional.pad(top, missing, value=-torch.inf),
        torch.nn.functional.pad(token_ids.int() + first_id, missing, value=-1),
        torch.where(nonfinite, torch.nan, values.logsumexp(dim=-1)),
        nonfinite,
    )
