"""Walking a recorded text by the rounds a method would have run, and the table that every sweep returns."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kdlab.decode.field import DraftField, PromptField
from kdlab.errors import ArgumentError
from kdlab.study.compare import ACCEPTANCE_FIELDS, is_simulated
from kdlab.study.traces.rounds import RoundTrace

COLUMNS = (
    "method",
    "setting",
    "budget",
    "rows",
    "prompt",
    "prompt_id",
    "kind",
    "num_rounds",
    "tokens_per_round",
    "round_lengths",
    "rows_per_round",
    "round_rows",
    "truncated",
    "simulated",
    "top_k",
    *ACCEPTANCE_FIELDS,
)


def check_field(field: object) -> None:
    """Raise ArgumentError unless `field` is a recorded DraftField of at least one prompt."""
    if isinstance(field, RoundTrace):
        expected = f"a DraftField: rounds say nothing of other budgets than their own {field.budget}"
        raise ArgumentError("field", expected, "a RoundTrace")
    if not isinstance(field, DraftField):
        raise ArgumentError("field", "a DraftField, as record returns", type(field).__name__)
    if not field.prompts:
        raise ArgumentError("field", "at least one prompt", "none")


def walk_rounds(accepted: np.ndarray, num_starts: int) -> np.ndarray:
    """Positions at which rounds start: from p to p + accepted[p] + 1 while p < num_starts.

    Args:
        accepted: [positions] int, draft tokens that a round at each position would accept.
        num_starts: rounds may start at positions 0..num_starts-1.

    Returns:
        [rounds] int64; the last round is kept whole even where it passes the end of the text.
    """
    starts, position = [], 0
    while position < num_starts:
        starts.append(position)
        position += int(accepted[position]) + 1
    return np.array(starts, dtype=np.int64)


def sweep_row(
    prompt: PromptField, accepted: np.ndarray, arm: Mapping[str, Any], verified: np.ndarray | None = None
) -> dict[str, Any]:
    """One row of a sweep table: the rounds of one prompt under one arm.

    Args:
        prompt: draft field of the prompt.
        accepted: [positions] int, draft tokens that a round at each position would accept.
        arm: method, setting, budget (most nodes a round may hold) and truncated.
        verified: [positions] int, rows that a round at each position would verify; None: budget + 1 in every round.
    """
    starts = walk_rounds(accepted, prompt.num_starts)
    lengths = accepted[starts].astype(np.int64) + 1
    rows = np.full(len(starts), arm["budget"] + 1) if verified is None else verified[starts]
    place = {"prompt": prompt.prompt, "prompt_id": prompt.prompt_id, "kind": prompt.kind}
    return rounds_row(arm, place, lengths.tolist(), rows.astype(np.int64).tolist())


def rounds_row(
    arm: Mapping[str, Any], place: Mapping[str, Any], lengths: Sequence[int], verified: Sequence[int]
) -> dict[str, Any]:
    """One row of a sweep table from rounds that are known, walked or live.

    Args:
        arm: as for `sweep_row`.
        place: prompt (its index), prompt_id and kind.
        lengths: tokens of each round, the bonus among them.
        verified: rows of each round.
    """
    return {
        **arm,
        # One dtype in every sweep, thresholds among them, so that tables concatenate.
        "setting": float(arm["setting"]),
        "rows": arm["budget"] + 1,
        **place,
        "num_rounds": len(lengths),
        "tokens_per_round": sum(lengths) / len(lengths) if lengths else float("nan"),
        "round_lengths": list(lengths),
        "rows_per_round": sum(verified) / len(verified) if verified else float("nan"),
        "round_rows": list(verified),
    }


def sweep_table(field: DraftField, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Turn rows of `sweep_row` into the common table, with what the recording was made from in each row."""
    common = {name: field.provenance.get(name) for name in ACCEPTANCE_FIELDS} | {"top_k": field.top_k}
    simulated = {prompt.prompt: is_simulated(field.provenance, prompt.kind) for prompt in field.prompts}
    records = [{**row, **common, "simulated": simulated[row["prompt"]]} for row in rows]
    return pd.DataFrame.from_records(records, columns=list(COLUMNS))
