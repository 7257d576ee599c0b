"""Record a draft field: decode each prompt once, then run the drafter at every position of the text."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import check_int
from kdlab.decode.decoding import Progress, decode_provenance, run_all, start
from kdlab.decode.engine import Engine, prefill
from kdlab.decode.field import DraftField, PromptField, following
from kdlab.decode.transcript import Transcript
from kdlab.errors import ArgumentError
from kdlab.kernels.reference import draft_topk
from kdlab.model.cache import LatentCache
from kdlab.model.pair import Pair
from kdlab.model.prompts import Prompt

_DECODE_BUDGET = 16  # any budget writes the same text; this one needs few rounds
_POSITIONS_AT_ONCE = 64  # bounds the logits that are held: of the whole text only the top K are kept


def record(
    pair: Pair,
    prompts: object,
    *,
    top_k: int = 64,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token_ids: Iterable[int] | None = None,
    streams: int | None = None,
    progress: Progress | None = None,
) -> DraftField:
    """Decode the prompts once and keep what the drafter says at every position of the text.

    From the result `kdlab.study` computes every budget, chain and beam without a model. Arguments as in `generate`;
    `top_k` is the number of draft candidates kept a slot, the whole vocabulary where that is smaller.

    Returns:
        The DraftField of the prompts.

    Raises:
        ArgumentError: the pair has no drafter, or an argument has a wrong value.
    """
    if getattr(pair, "drafter", None) is None:
        got = "no drafter" if isinstance(pair, Pair) else type(pair).__name__
        raise ArgumentError("pair", "a Pair with a drafter", got)
    vocab_size, depth_limit = pair.target.config.vocab_size, pair.depth_limit
    top_k = min(check_int("top_k", top_k, minimum=1), vocab_size)
    engine = start(
        pair,
        prompts,
        method="ddtree",
        budget=_DECODE_BUDGET,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_token_ids=stop_token_ids,
        streams=streams,
        tail=depth_limit + 1,
    )
    run_all(engine, progress)
    fields = [_record_prompt(engine, index, prompt, top_k) for index, prompt in enumerate(engine.prompts)]
    provenance = decode_provenance(
        pair, engine.settings, engine.prompts, impl=engine.impl, method="record", budget=None, top_k=top_k
    )
    return DraftField(fields, top_k, vocab_size, depth_limit, provenance)


@torch.inference_mode()
def _record_prompt(engine: Engine, index: int, prompt: Prompt, top_k: int) -> PromptField:
    pair, transcript = engine.pair, engine.transcripts[index]
    output_ids = np.array(transcript.output_ids, dtype=np.int32)
    all_ids = np.array(transcript.output_ids + transcript.tail_ids, dtype=np.int32)
    next_ids = torch.from_numpy(following(all_ids, len(output_ids), pair.depth_limit)).to(pair.device)
    pieces = []
    for logits, wanted in zip(_draft_everywhere(engine, transcript), next_ids.split(_POSITIONS_AT_ONCE), strict=True):
        top = draft_topk(logits, top_k)
        pieces.append((top.token_ids, top.log_probs, *_find(logits, wanted)))
    token_ids, log_probs, next_log_prob, next_rank = (
        torch.cat(column).cpu().numpy() for column in zip(*pieces, strict=True)
    )
    return PromptField(
        prompt=index,
        prompt_id=prompt.id,
        kind=prompt.kind,
        prompt_ids=np.array(transcript.prompt_ids, dtype=np.int32),
        output_ids=output_ids,
        tail_ids=np.array(transcript.tail_ids, dtype=np.int32),
        num_starts=min(transcript.num_starts, len(output_ids)),
        token_ids=token_ids,
        log_probs=log_probs,
        next_log_prob=next_log_prob,
        next_rank=next_rank,
    )


def _draft_everywhere(engine: Engine, transcript: Transcript) -> Iterator[Tensor]:
    """Yield draft logits [n, L, V] with each output token in turn as the anchor, n at most `_POSITIONS_AT_ONCE`."""
    pair, settings, committed = engine.pair, engine.settings, transcript.prompt_ids + transcript.output_ids
    cache = LatentCache.allocate(pair.target.config, 1, len(committed), pair.dtype, pair.device)
    context = pair.new_context(1, len(committed))
    ids = torch.tensor([committed], device=pair.device)
    prefill(pair, ids, cache, context, settings.impl, settings.op_impl)
    anchors = torch.tensor(transcript.output_ids, device=pair.device)
    starts = len(transcript.prompt_ids) + torch.arange(len(anchors), device=pair.device)
    for anchor, begin in zip(anchors.split(_POSITIONS_AT_ONCE), starts.split(_POSITIONS_AT_ONCE), strict=True):
        yield pair.ranks.join(pair.draft_logits(anchor, begin, context, settings.op_impl), "vocabulary")


def _find(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability [T, L] float32 and 0-based rank [T, L] int32 of given tokens; ties rank the smaller id first."""
    values, wanted = logits.double(), token_ids.long()[..., None]
    chosen = values.gather(-1, wanted)
    earlier = torch.arange(logits.shape[-1], device=logits.device) < wanted
    rank = ((values > chosen) | ((values == chosen) & earlier)).sum(dim=-1)
    return (chosen.squeeze(-1) - values.logsumexp(dim=-1)).float(), rank.int()
