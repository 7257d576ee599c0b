"""Where acceptance happens: by depth of the tree and by rank of the draft's candidates."""

import numpy as np
import pandas as pd

from kdlab.checks import check_int
from kdlab.decode.field import DraftField
from kdlab.study.bootstrap import ratio
from kdlab.study.path_rank import candidate_ranks, min_budget
from kdlab.study.walk import check_field, walk_rounds
from kdlab.tree import MAX_BUDGET


def acceptance_by_depth(field: DraftField, budget: int) -> pd.DataFrame:
    """Acceptance at each depth over the rounds that decoding with one budget would run.

    Args:
        field: recorded draft field.
        budget: tree budget of the rounds.

    Returns:
        One row a depth 1..L: num_rounds, num_reached (rounds that accepted depth - 1 tokens or more), num_accepted,
        conditional (num_accepted / num_reached, NaN where none reached it) and cumulative (num_accepted / num_rounds).

    Raises:
        ArgumentError: `budget` is no integer or negative.
    """
    check_field(field)
    budget = check_int("budget", budget, minimum=0, maximum=MAX_BUDGET)
    accepted = []
    for prompt, needed in zip(field.prompts, min_budget(field, max_budget=budget), strict=True):
        matched = (needed <= budget).sum(axis=1)
        accepted.append(matched[walk_rounds(matched, prompt.num_starts)])
    lengths = np.concatenate(accepted) if accepted else np.zeros(0, dtype=np.int64)
    depths = np.arange(1, field.depth_limit + 1)
    at_least = (lengths[:, None] >= np.arange(field.depth_limit + 1)).sum(axis=0)
    return pd.DataFrame({
        "depth": depths,
        "num_rounds": len(lengths),
        "num_reached": at_least[:-1],
        "num_accepted": at_least[1:],
        "conditional": ratio(at_least[1:], at_least[:-1]),
        "cumulative": ratio(at_least[1:], np.full(field.depth_limit, len(lengths))),
    })


def acceptance_by_rank(field: DraftField, budget: int | None = None, *, max_rank: int = 16) -> pd.DataFrame:
    """How often the target's token is of rank r in the draft at depth d, over all positions rounds may start at.

    Args:
        field: recorded draft field.
        budget: the condition of the conditional columns: the tokens of all smaller depths are in the best-first tree of
            this budget; None asks that each of them is the draft's best token.
        max_rank: ranks 0..max_rank-1 get a row each; what is missing to 1 lies at larger ranks.

    Returns:
        One row a (depth, rank): num_positions, probability, num_conditional (positions where the condition holds) and
        conditional (NaN where it holds nowhere).

    Raises:
        ArgumentError: `budget` or `max_rank` is no integer or too small.
    """
    check_field(field)
    max_rank = check_int("max_rank", max_rank, minimum=1, maximum=10_000)
    ranks = np.concatenate([prompt.next_rank[: prompt.num_starts] for prompt in field.prompts])
    reached = np.concatenate(prefix_matched(field, budget))
    rows = []
    for depth in range(field.depth_limit):
        for rank in range(max_rank):
            hit = ranks[:, depth] == rank
            given = reached[:, depth]
            rows.append((depth + 1, rank, len(hit), hit.sum(), given.sum(), (hit & given).sum()))
    table = pd.DataFrame(rows, columns=["depth", "rank", "num_positions", "hits", "num_conditional", "both"])
    table["probability"] = ratio(table["hits"].to_numpy(), table["num_positions"].to_numpy())
    table["conditional"] = ratio(table["both"].to_numpy(), table["num_conditional"].to_numpy())
    return table[["depth", "rank", "num_positions", "probability", "num_conditional", "conditional"]]


def prefix_matched(field: DraftField, budget: int | None) -> list[np.ndarray]:
    """Where the target's tokens at all smaller depths were drafted, over the positions rounds may start at.

    Args:
        field: recorded draft field.
        budget: in the best-first tree of this budget; None: each as the draft's best token.

    Returns:
        [num_starts, L] bool a prompt; depth 1 is True everywhere.
    """
    if budget is None:
        matched = [np.cumprod(candidate_ranks(prompt) == 0, axis=1).astype(bool) for prompt in field.prompts]
    else:
        budget = check_int("budget", budget, minimum=0, maximum=MAX_BUDGET)
        matched = [needed <= budget for needed in min_budget(field, max_budget=budget)]
    shifted = [np.pad(array[:, :-1], ((0, 0), (1, 0)), constant_values=True) for array in matched]
    return [array[: prompt.num_starts] for array, prompt in zip(shifted, field.prompts, strict=True)]
