"""What a tree must beat: chains of every length, adaptive chains, beams; and trees cut where the draft is unsure."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch

from kdlab.checks import check_float, check_int
from kdlab.decode.field import DraftField, PromptField
from kdlab.study.path_rank import best_first_trees, candidate_ranks, path_rows, usable_rows
from kdlab.study.sweeps import check_settings
from kdlab.study.walk import check_field, sweep_row, sweep_table
from kdlab.tree import build_beam

# Cuts of the adaptive chain tried when none are named: close where drafters are sure, wide where they are not.
DEFAULT_THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

TREE_THRESHOLDS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)


def sweep_chains(field: DraftField, lengths: Sequence[int] | None = None) -> pd.DataFrame:
    """Walk the recorded text with chains: the draft's best token at each depth, cut at a fixed length.

    Args:
        field: recorded draft field.
        lengths: distinct chain lengths in 1..L; None tries all of them.

    Returns:
        The table of `sweep`, method "chain", setting and budget the length, one row a (length, prompt).

    Raises:
        ArgumentError: no length, one twice or one outside 1..L.
    """
    check_field(field)
    limit = field.depth_limit
    chosen = range(1, limit + 1) if lengths is None else lengths
    checked = check_settings("lengths", chosen, partial(check_int, minimum=1, maximum=limit))
    rows = []
    for length in checked:
        arm = {"method": "chain", "setting": length, "budget": length, "truncated": False}
        for prompt in field.prompts:
            rows.append(sweep_row(prompt, np.minimum(_chain_matches(prompt), length), arm))
    return sweep_table(field, rows)


def sweep_adaptive_chains(field: DraftField, thresholds: Sequence[float] | None = None) -> pd.DataFrame:
    """Walk the recorded text with chains cut before the first slot whose best probability is below a threshold.

    Args:
        field: recorded draft field.
        thresholds: distinct probabilities in [0, 1]; None tries `DEFAULT_THRESHOLDS`.

    Returns:
        The table of `sweep`, method "adaptive_chain", setting the threshold, budget the longest chain L. The rows
        verified differ from round to round: rows_per_round is their mean, round_rows their list.

    Raises:
        ArgumentError: no threshold, one twice or one that is no probability.
    """
    check_field(field)
    chosen = DEFAULT_THRESHOLDS if thresholds is None else thresholds
    checked = check_settings("thresholds", chosen, partial(check_float, minimum=0.0, maximum=1.0))
    rows = []
    for threshold in checked:
        arm = {"method": "adaptive_chain", "setting": threshold, "budget": field.depth_limit, "truncated": False}
        for prompt in field.prompts:
            best = np.exp(prompt.log_probs[:, :, 0], dtype=np.float64)
            drafted = _leading(usable_rows(prompt) & (best >= threshold))
            accepted = np.minimum(_chain_matches(prompt), drafted)
            rows.append(sweep_row(prompt, accepted, arm, verified=drafted + 1))
    return sweep_table(field, rows)


def sweep_adaptive_trees(field: DraftField, budget: int, thresholds: Sequence[float] | None = None) -> pd.DataFrame:
    """Walk the recorded text with best-first trees that keep the nodes whose path has at least a probability.

    What the adaptive chain is to chains: a node's path probability is the product of the draft's along its path, so
    the tree is small where the draft is sure at once or of nothing. It says what sizes that fit the round would add.

    Args:
        field: recorded draft field.
        budget: most nodes of a tree.
        thresholds: distinct probabilities in (0, 1]; None tries `TREE_THRESHOLDS`.

    Returns:
        The table of `sweep`, method "adaptive_tree", setting the threshold, budget the most nodes; rows verified differ
        from round to round.

    Raises:
        ArgumentError: no threshold, one twice, or one that is no probability above 0; a budget above the top K.
    """
    check_field(field)
    check_int("budget", budget, minimum=1, maximum=None if field.whole_vocabulary else field.top_k)
    chosen = TREE_THRESHOLDS if thresholds is None else thresholds
    checked = check_settings("thresholds", chosen, partial(check_float, above=0.0, maximum=1.0))
    rows = []
    arms = [{"method": "adaptive_tree", "setting": cut, "budget": budget, "truncated": False} for cut in checked]
    for prompt in field.prompts:
        tree = best_first_trees(prompt, np.arange(len(prompt.output_ids)), budget, field.vocab_size)
        needed = path_rows(tree, prompt.next_ids)
        logp, used = tree.logp.numpy(), np.arange(budget + 1) < tree.num_nodes.numpy()[:, None]
        for cut, arm in zip(checked, arms, strict=True):
            verified = (used & (logp >= np.log(cut))).sum(axis=1)  # best first, so these rows are a prefix
            rows.append(sweep_row(prompt, (needed < verified[:, None]).sum(axis=1), arm, verified=verified))
    return sweep_table(field, rows)


def sweep_beam(field: DraftField, widths: Sequence[int], budget: int | None = None) -> pd.DataFrame:
    """Walk the recorded text with beam trees.

    Args:
        field: recorded draft field with K candidates a slot.
        widths: distinct beam widths, at most K unless K is the whole vocabulary.
        budget: nodes kept of each beam tree; None, or more than width x L, keeps all of it.

    Returns:
        The table of `sweep`, method "beam", setting the width, budget the nodes a tree may hold.

    Raises:
        ArgumentError: no width, one twice, one below 1 or above that; a budget that is no integer or negative.
    """
    check_field(field)
    widest = None if field.whole_vocabulary else field.top_k
    checked = check_settings("widths", widths, partial(check_int, minimum=1, maximum=widest))
    if budget is not None:
        check_int("budget", budget, minimum=0)
    rows = []
    for width in checked:
        most = width * field.depth_limit if budget is None else min(budget, width * field.depth_limit)
        arm = {"method": "beam", "setting": width, "budget": most, "truncated": False}
        for prompt in field.prompts:
            log_probs, token_ids = torch.from_numpy(prompt.log_probs), torch.from_numpy(prompt.token_ids)
            tree = build_beam(log_probs, token_ids, width, most, vocab_size=field.vocab_size)
            accepted = np.isfinite(path_rows(tree, prompt.next_ids)).sum(axis=1)
            rows.append(sweep_row(prompt, accepted, arm))
    return sweep_table(field, rows)


def _chain_matches(prompt: PromptField) -> np.ndarray:
    """Leading depths at which the draft's best token is the target's: [positions] int64."""
    return _leading(candidate_ranks(prompt) == 0)


def _leading(flags: np.ndarray) -> np.ndarray:
    """Number of leading True values of each row: [positions, L] bool -> [positions] int64."""
    return np.cumprod(flags, axis=1, dtype=np.int64).sum(axis=1)
