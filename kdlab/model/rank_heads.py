"""What follows the vocabulary-parallel head: top-K and sampling by shard, merged on every rank alike.

Each rank looks at its own columns of the logits; what is exchanged are a few candidates a row, in one message.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor

from kdlab.checks import check_int
from kdlab.kernels.draft_topk import TopK, TopKShard, draft_topk, draft_topk_shard
from kdlab.kernels.merge_shards import best_candidate, choose_token, merge_candidates, merge_topk
from kdlab.kernels.sample_shards import SampleShard, target_sample_shard, top_p_mass_shard
from kdlab.kernels.target_sample import target_sample
from kdlab.model.ranks import Ranks

_ALIGNMENT = 8  # bytes, of a float64
_Shard = TypeVar("_Shard", TopKShard, SampleShard)


def top_over_ranks(ranks: Ranks, logits: Tensor, k: int, impl: str) -> TopK:
    """Return the best K tokens of the whole vocabulary; see `draft_topk`.

    Args:
        ranks: that share the vocabulary.
        logits: [S, L, V / ranks], this rank's columns.
        k: candidates, 1 <= K <= V.
        impl: of the op.

    Raises:
        ArgumentError: K is out of range.
    """
    k = check_int("k", k, minimum=1, maximum=ranks.size * logits.shape[-1])
    if ranks.size == 1:
        return draft_topk(logits, k, impl=impl)
    first_id = ranks.rank * logits.shape[-1]
    shards = gather_fields(ranks, draft_topk_shard(logits, k, first_id=first_id, impl=impl))
    if ranks.missing:  # a copy stands for a rank that has other tokens
        others = ranks.shifts(logits.device, logits.shape[-1])
        shards = shards._replace(token_ids=shards.token_ids + others[:, None, None, None])
    return merge_topk(shards, impl=impl)


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
    shards = gather_fields(ranks, own)
    if temperature == 0.0 or top_p == 1.0:
        return best_candidate(shards, impl=impl)
    candidates = merge_candidates(shards, impl=impl)
    mass = top_p_mass_shard(logits, candidates, first_id=first_id, temperature=temperature, impl=impl)
    ranks.all_reduce(mass, "head")
    return choose_token(candidates, mass, top_p=top_p, impl=impl)


def gather_fields(ranks: Ranks, own: _Shard) -> _Shard:
    """Return the fields of every rank's shard, stacked [size, ...]; they travel as the bytes of one message."""
    fields = sorted(own._asdict().items(), key=lambda item: -item[1].element_size())  # wide ones first: all lie aligned
    pieces = [field.flatten().view(torch.uint8) for _, field in fields]
    size = sum(piece.numel() for piece in pieces)
    message = pieces[0].new_empty(-(-size // _ALIGNMENT) * _ALIGNMENT)
    torch.cat(pieces, out=message[:size])
    parts = ranks.all_gather(message, "head")[:, :size].split([piece.numel() for piece in pieces], dim=1)
    shaped = (part.view(field.dtype).unflatten(1, field.shape) for (_, field), part in zip(fields, parts, strict=True))
    return own._replace(**dict(zip((name for name, _ in fields), shaped, strict=True)))
