"""What follows the vocabulary-parallel head: top-K and sampling by shard, merged on every rank alike.

Each rank looks at its own columns of the logits; what is exchanged are a few candidates a row, in one message.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kdlab.kernels.draft_topk import TopK, TopKShard, draft_topk, draft_topk_shard, merge_topk
from kdlab.kernels.sample_shards import (
    SampleShard,
    choose_token,
    merge_candidates,
    target_sample_shard,
    top_p_mass_shard,
)
from kdlab.kernels.target_sample import target_sample
from kdlab.model.ranks import Ranks

_ALIGNMENT = 8  # bytes, of a float64


def top_over_ranks(ranks: Ranks, logits: Tensor, k: int, impl: str) -> TopK:
    """Return the best K tokens of the whole vocabulary; see `draft_topk`.

    Args:
        ranks: that share the vocabulary.
        logits: [S, L, V / ranks], this rank's columns.
        k: candidates.
        impl: of the op.
    """
    if ranks.size == 1:
        return draft_topk(logits, k, impl=impl)
    own = draft_topk_shard(logits, k, first_id=ranks.rank * logits.shape[-1], impl=impl)
    return merge_topk([TopKShard(*fields) for fields in _gather(ranks, own, logits.shape[-1])])


def sample_over_ranks(
    ranks: Ranks,
    logits: Tensor,
    *,
    temperature: float,
    top_p: float,
    seed: int,
    stream: Tensor,
    position: Tensor,
    impl: str,
) -> Tensor:
    """Return the target's token [S, N] i32 of the whole vocabulary; see `target_sample`.

    Args:
        ranks: that share the vocabulary.
        logits: [S, N, V / ranks], this rank's columns.
        temperature, top_p, seed, stream, position, impl: of the op.
    """
    draw: dict[str, Any] = dict(temperature=temperature, top_p=top_p, seed=seed, stream=stream, position=position)
    draw["impl"] = impl
    if ranks.size == 1:
        return target_sample(logits, **draw)
    first_id = ranks.rank * logits.shape[-1]
    own = target_sample_shard(logits, first_id=first_id, **draw)
    candidates = merge_candidates([SampleShard(*fields) for fields in _gather(ranks, own, logits.shape[-1])])
    mass = None
    if temperature > 0.0 and top_p < 1.0:
        mass = top_p_mass_shard(logits, candidates, first_id=first_id, temperature=temperature, impl=impl)
        ranks.all_reduce(mass, "head")
    return choose_token(candidates, mass, top_p=top_p)


def _gather(ranks: Ranks, own: TopKShard | SampleShard, width: int) -> Sequence[tuple[Tensor, ...]]:
    """Return the fields of every rank's shard, which travel as the bytes of one message."""
    message = torch.cat([_bytes(field) for field in own])
    gathered = ranks.all_gather(message, "head")
    fields, begin = {}, 0
    for name, field in own._asdict().items():
        end = begin + field.numel() * field.element_size()
        fields[name] = gathered[:, begin:end].view(field.dtype).unflatten(1, field.shape)
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
    if ranks.group is None:  # a slice that is timed alone: shards must not name the same tokens
        others = torch.arange(ranks.size, dtype=torch.int32, device=message.device) - ranks.rank
        ids = fields["token_ids"]
        fields["token_ids"] = torch.where(ids < 0, ids, ids + width * others.view(-1, *[1] * (ids.dim() - 1)))
    return list(zip(*(field.unbind(0) for field in fields.values()), strict=True))


def _bytes(field: Tensor) -> Tensor:
    flat = field.contiguous().flatten().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _ALIGNMENT))
