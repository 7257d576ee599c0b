"""Small draft fields for the study tests, and an oracle that knows nothing of the library's way to the same numbers."""

import itertools

import numpy as np

from kdlab.decode.field import DraftField, PromptField

DIGESTS = {"target_sha256": "t0", "drafter_sha256": "d0", "prompt_set_digest": "p0", "template_hash": "h0"}


def prompt_field(
    rng: np.random.Generator,
    *,
    index: int = 0,
    positions: int = 20,
    depth_limit: int = 3,
    vocab_size: int = 6,
    top_k: int | None = None,
    ties: bool = False,
    stop: bool = False,
    follow: float = 0.7,
    kind: str = "text",
) -> PromptField:
    """Draw a prompt whose target follows a good draft rank with probability `follow`, any token otherwise."""
    logits = rng.normal(size=(positions, depth_limit, vocab_size)) * 2
    if ties:
        logits = np.round(logits)
    log_probs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    order = np.argsort(-log_probs, axis=-1, kind="stable").astype(np.int32)
    all_ids = rng.integers(0, vocab_size, positions + depth_limit + 1)
    for position in range(positions - 1):
        if rng.random() < follow:
            all_ids[position + 1] = order[position, 0, min(rng.geometric(0.6) - 1, vocab_size - 1)]
    following = all_ids[np.arange(positions)[:, None] + 1 + np.arange(depth_limit)]
    top_k = vocab_size if top_k is None else top_k
    return PromptField(
        prompt=index,
        prompt_id=f"prompt-{index}",
        kind=kind,
        prompt_ids=np.arange(3, dtype=np.int32),
        output_ids=all_ids[:positions].astype(np.int32),
        tail_ids=all_ids[positions:].astype(np.int32),
        num_starts=positions - 1 if stop else positions,
        token_ids=order[..., :top_k].copy(),
        log_probs=np.take_along_axis(log_probs, order, -1)[..., :top_k].copy(),
        next_log_prob=np.take_along_axis(log_probs, following[..., None], -1)[..., 0],
        next_rank=(order == following[..., None]).argmax(-1).astype(np.int32),
    )


def draft_field(
    seed: int = 0, num_prompts: int = 3, *, vocab_size: int = 6, kinds: tuple[str, ...] = ("text",), **options
) -> DraftField:
    """A DraftField of `num_prompts` random prompts; `options` as for `prompt_field`."""
    rng = np.random.default_rng(seed)
    prompts = [
        prompt_field(rng, index=index, vocab_size=vocab_size, kind=kinds[index % len(kinds)], **options)
        for index in range(num_prompts)
    ]
    depth_limit, top_k = prompts[0].token_ids.shape[1:]
    return DraftField(prompts, top_k, vocab_size, depth_limit, dict(DIGESTS))


def all_paths_in_order(log_probs: np.ndarray) -> list[tuple[int, ...]]:
    """Every rank tuple of every depth of one position ([L, K]), best score first, equal scores lexicographically."""
    scored = []
    for depth in range(1, len(log_probs) + 1):
        for ranks in itertools.product(range(log_probs.shape[1]), repeat=depth):
            score = 0.0
            for level, rank in enumerate(ranks):
                score += float(log_probs[level, rank])
            scored.append((-score, ranks))
    return [ranks for _, ranks in sorted(scored)]


def oracle_accepted(prompt: PromptField, position: int, budget: int) -> int:
    """Tokens accepted at a position: make the tree as a set of token tuples, then look the text up in it."""
    paths = all_paths_in_order(prompt.log_probs[position])[:budget]
    tokens = prompt.token_ids[position]
    tree = {tuple(int(tokens[level, rank]) for level, rank in enumerate(ranks)) for ranks in paths}
    text = [int(token) for token in np.concatenate([prompt.output_ids, prompt.tail_ids])]
    accepted = 0
    while accepted < len(tokens) and tuple(text[position + 1 : position + 2 + accepted]) in tree:
        accepted += 1
    return accepted


def oracle_rounds(prompt: PromptField, accepted_at) -> list[int]:
    """Round lengths when a round at position p accepts accepted_at(p) tokens."""
    lengths, position = [], 0
    while position < prompt.num_starts:
        lengths.append(accepted_at(position) + 1)
        position += lengths[-1]
    return lengths
