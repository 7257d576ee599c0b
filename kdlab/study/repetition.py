"""How much a recorded text repeats itself: a loop is drafted without fault, and flatters every method."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import pandas as pd

from kdlab.decode.field import DraftField
from kdlab.errors import ArgumentError
from kdlab.study.walk import check_field

RUN = 8  # tokens
LOOP_SHARE = 0.3  # a kind of text that repeats more of its runs than this, decoded greedily, is a loop


def repeated_share(outputs: Iterable[Sequence[int]]) -> float:
    """Return the share of runs of eight tokens that the same output held before; NaN without a run.

    Args:
        outputs: token ids, one sequence a prompt.
    """
    repeated = total = 0
    for ids in outputs:
        seen: set[tuple[int, ...]] = set()
        for begin in range(len(ids) - RUN + 1):
            run = tuple(ids[begin : begin + RUN])
            repeated += run in seen
            seen.add(run)
            total += 1
    return repeated / total if total else float("nan")


def repetition(field: DraftField) -> pd.DataFrame:
    """Describe the recorded text of each kind.

    Args:
        field: recorded draft field.

    Returns:
        One row a kind, in order of appearance: kind, num_tokens, stopped (share of prompts that ended by a stop token),
        repeated (share of runs of eight tokens that the output held before) and loop (repeated above 0.3).

    Raises:
        ArgumentError: `field` is no recorded field.
    """
    check_field(field)
    rows = []
    for kind in dict.fromkeys(prompt.kind for prompt in field.prompts):
        prompts = [prompt for prompt in field.prompts if prompt.kind == kind]
        outputs = [prompt.output_ids.tolist() for prompt in prompts]
        stopped = float(np.mean([prompt.num_starts < len(prompt.output_ids) for prompt in prompts]))
        share = repeated_share(outputs)
        rows.append((kind, sum(map(len, outputs)), stopped, share, share > LOOP_SHARE))
    return pd.DataFrame(rows, columns=["kind", "num_tokens", "stopped", "repeated", "loop"])


def without_loops(table: pd.DataFrame, loops: Collection[str]) -> pd.DataFrame:
    """Return the rows of a sweep table whose kind is no loop: what a headline may rest on.

    Args:
        table: rows of the sweeps.
        loops: kinds to leave out.

    Raises:
        ArgumentError: no row is left.
    """
    kept = table[~table["kind"].isin(loops)]
    if kept.empty:
        raise ArgumentError("loops", "at least one kind whose text is no loop", ", ".join(sorted(loops)))
    return kept
