"""`min_budget`: for every position and depth, the smallest draft tree that holds the target's next tokens."""

import numpy as np
import torch

from kdlab.checks import check_int
from kdlab.decode.field import DraftField, PromptField
from kdlab.study.walk import check_field
from kdlab.tree import MAX_BUDGET, build_best_first
from kdlab.tree.draft_tree import DraftTree

# Ancestor bits of the trees that are built in one call: bounds memory, as they grow with the square of the budget.
_BITS_PER_BUILD = 1 << 28
# Most positions find their tokens in a small tree, so the large one is built only for those that did not.
_FIRST_BUDGET, _BUDGET_GROWTH = 16, 8


def min_budget(field: DraftField, *, max_budget: int = 1024) -> list[np.ndarray]:
    """Find the smallest budget whose best-first tree at position p holds the next d tokens of the target.

    Row i of a best-first tree is in every tree of budget i or more (its trees are nested), so the row at which the
    walk over the target's own tokens stands is the answer; ties are settled by the builder itself.

    Args:
        field: recorded draft field with K candidates a slot.
        max_budget: B, the largest tree looked into, 0 to MAX_BUDGET.

    Returns:
        One [positions, L] float64 array a prompt, non-decreasing along a row; [p, d - 1] belongs to depth d and is inf
        where a token is outside the top K, the draft row is not finite or more than `max_budget` nodes are needed.
        Values above K are exact for a decoder with the same K only, unless K is the whole vocabulary.

    Raises:
        ArgumentError: `max_budget` is no integer or out of range.
    """
    check_field(field)
    max_budget = check_int("max_budget", max_budget, minimum=0, maximum=MAX_BUDGET)
    return [_prompt_min_budget(prompt, max_budget, field.vocab_size) for prompt in field.prompts]


def _prompt_min_budget(prompt: PromptField, max_budget: int, vocab_size: int) -> np.ndarray:
    """Build growing trees at the positions that still miss a reachable token; [positions, L] float64."""
    bound = _lower_bound(prompt)
    found = np.full(bound.shape, np.inf)
    budget = min(_FIRST_BUDGET, max_budget)
    while True:
        open_positions = np.flatnonzero((np.isinf(found) & (bound <= budget)).any(axis=1))
        at_once = max(1, _BITS_PER_BUILD // (budget + 1) ** 2)
        for start in range(0, len(open_positions), at_once):
            chosen = open_positions[start : start + at_once]
            tree = best_first_trees(prompt, chosen, budget, vocab_size)
            found[chosen] = path_rows(tree, prompt.next_ids[chosen])
        if budget == max_budget:
            return found
        budget = min(budget * _BUDGET_GROWTH, max_budget)


def best_first_trees(prompt: PromptField, positions: np.ndarray, budget: int, vocab_size: int) -> DraftTree:
    """Build the best-first trees of some positions of one prompt; a tree of S = len(positions) streams."""
    log_probs = torch.from_numpy(np.ascontiguousarray(prompt.log_probs[positions]))
    token_ids = torch.from_numpy(np.ascontiguousarray(prompt.token_ids[positions]))
    return build_best_first(log_probs, token_ids, budget, vocab_size=vocab_size)


def path_rows(tree: DraftTree, next_ids: np.ndarray) -> np.ndarray:
    """Walk the next tokens down every tree.

    Args:
        tree: S trees.
        next_ids: [S, L] int, the tokens to look for, depth 1 first.

    Returns:
        [S, L] float64: the row that holds the first d tokens, inf from the first missing token on.
    """
    token, parent = tree.token.numpy(), tree.parent.numpy()
    used = np.arange(tree.capacity) < tree.num_nodes.numpy()[:, None]
    rows = np.full(next_ids.shape, np.inf)
    current = np.zeros(len(next_ids), dtype=np.int64)
    alive = np.ones(len(next_ids), dtype=bool)
    for depth in range(next_ids.shape[1]):
        hit = used & (parent == current[:, None]) & (token == next_ids[:, depth, None]) & alive[:, None]
        alive = hit.any(axis=1)
        current = np.where(alive, hit.argmax(axis=1), -1)
        rows[alive, depth] = current[alive]
    return rows


def usable_rows(prompt: PromptField) -> np.ndarray:
    """Where a tree may use the draft row: no NaN, no +inf, something finite; [positions, L] bool."""
    return np.isfinite(prompt.log_probs[:, :, 0]) & ~np.isnan(prompt.log_probs).any(axis=-1)


def candidate_ranks(prompt: PromptField) -> np.ndarray:
    """Ranks of the target's next tokens among the candidates a tree may use: [positions, L] int64, K where absent."""
    usable = usable_rows(prompt)[..., None] & (prompt.log_probs > -np.inf)
    hit = (prompt.token_ids == prompt.next_ids[..., None]) & usable
    return np.where(hit.any(axis=-1), hit.argmax(axis=-1), hit.shape[-1])


def _lower_bound(prompt: PromptField) -> np.ndarray:
    """Nodes that surely come no later than the path: those with no rank above its own at any depth; [positions, L].

    A tuple of ranks that is nowhere larger has a score at least as good and is lexicographically smaller, so all
    prod(rank + 1) of each depth precede the path, whatever the ties.
    """
    ranks = candidate_ranks(prompt).astype(np.float64)
    ranks[ranks == prompt.token_ids.shape[-1]] = np.inf
    return np.cumsum(np.cumprod(ranks + 1.0, axis=1), axis=1)
