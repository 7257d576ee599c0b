"""Whether the drafter's later distributions still hold once the target has left the drafter's own best path.

A block drafter gives all depths at once: its distribution at depth d has seen none of the tokens at smaller depths. A
tree offers the same candidates behind every node of a depth, so behind an accepted sibling they may fit worse.
"""

import numpy as np
import pandas as pd

from kdlab.decode.field import DraftField, PromptField
from kdlab.study.acceptance import prefix_matched
from kdlab.study.bootstrap import ratio
from kdlab.study.path_rank import candidate_ranks
from kdlab.study.walk import check_field

TOP_PATH, JUST_LEFT, LEFT_EARLIER = "top path", "sibling just before", "sibling earlier"
PREFIXES = (TOP_PATH, JUST_LEFT, LEFT_EARLIER)


def acceptance_after_sibling(field: DraftField, budget: int) -> pd.DataFrame:
    """Compare the draft's best token at each depth by how the accepted tokens before it were ranked.

    A position counts at depth d where the target's tokens at depths 1..d-1 are all in the best-first tree of `budget`.
    Its prefix is the "top path" (all of them the draft's best token), "sibling just before" (the one at d - 1 is not)
    or "sibling earlier" (the one at d - 1 is, an earlier one is not). Positions off the top path are also those where
    the draft was unsure, so shares alone say little: compare `observed` with `predicted`, the draft's own probability
    of the same tokens. A draft that holds keeps its gap.

    Args:
        field: recorded draft field.
        budget: tree budget that the prefix must fit.

    Returns:
        One row a (depth 2..L, prefix): num_positions, hits (the target's token is the draft's best), observed
        (hits / num_positions), predicted (mean probability of the draft's best token), gap (observed - predicted) and
        mean_log_prob (of the target's token, nats); the last four are NaN where num_positions is 0.

    Raises:
        ArgumentError: `budget` is no integer or out of range.
    """
    check_field(field)
    reached = np.concatenate(prefix_matched(field, budget))
    ranks = np.concatenate([candidate_ranks(prompt)[: prompt.num_starts] for prompt in field.prompts])
    best = np.concatenate([_best_probability(prompt) for prompt in field.prompts])
    given = np.concatenate([prompt.next_log_prob[: prompt.num_starts] for prompt in field.prompts])
    rows = []
    for depth in range(1, field.depth_limit):
        all_best = (ranks[:, :depth] == 0).all(axis=1)
        last_best = ranks[:, depth - 1] == 0
        groups = (all_best, ~last_best, last_best & ~all_best)
        for prefix, group in zip(PREFIXES, groups, strict=True):
            chosen = group & reached[:, depth] & np.isfinite(best[:, depth])
            sums = (ranks[chosen, depth] == 0).sum(), best[chosen, depth].sum(), given[chosen, depth].sum()
            rows.append((depth + 1, prefix, chosen.sum(), *sums))
    table = pd.DataFrame(rows, columns=["depth", "prefix", "num_positions", "hits", "best", "given"])
    number = table["num_positions"].to_numpy()
    table["observed"] = ratio(table["hits"].to_numpy(), number)
    table["predicted"] = ratio(table.pop("best").to_numpy(), number)
    table["gap"] = table["observed"] - table["predicted"]
    table["mean_log_prob"] = ratio(table.pop("given").to_numpy(), number)
    return table


def _best_probability(prompt: PromptField) -> np.ndarray:
    """[num_starts, L] float64: the probability of the draft's best token; NaN in an unusable row."""
    return np.exp(prompt.log_probs[: prompt.num_starts, :, 0], dtype=np.float64)
