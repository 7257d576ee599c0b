"""Rounds over real ranks beside what one rank's slice and the times of collectives let expect."""

from dataclasses import replace
from typing import Any

import pandas as pd

from kdlab.bench.collectives import CollectiveTimes
from kdlab.bench.full_width.table import KEYS, with_case
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.paths import K26_SHAPES
from kdlab.study.step_cost import Step

MOST_APART = 0.05
"""Share of the expected time up to which a slice scaled up stands for rounds over its ranks."""


def rank_table(rows: pd.DataFrame, collectives: pd.DataFrame) -> pd.DataFrame:
    """Return one line a point that several GPUs ran.

    Args:
        rows: of `bench_round` over real ranks; others among them are passed over.
        collectives: of `bench_collectives` over as many ranks.

    Returns:
        KEYS, us (the round), slice_us (the same without collectives), collectives_us (what chains of them let expect),
        inside_us (us - slice_us) and difference: of us from slice_us + collectives_us, as a share of that sum.

    Raises:
        ArgumentError: collectives of so many ranks, or of such sizes, were not timed.
    """
    table, times = with_case(rows), CollectiveTimes(collectives)
    timed = table[table["gpus"] > 1].set_index(KEYS)
    found = timed.loc[timed["metric"] == "round", ["value"]].rename(columns={"value": "us"})
    found["slice_us"] = timed.loc[timed["metric"] == "slice", "value"]
    found = found.dropna().reset_index()
    found["collectives_us"] = [_collectives_us(times, point) for point in found[KEYS].to_dict("records")]
    found["inside_us"] = found["us"] - found["slice_us"]
    found["difference"] = found["us"] / (found["slice_us"] + found["collectives_us"]) - 1.0
    return found


def rank_verdict(table: pd.DataFrame) -> str:
    """Say how far the points of `rank_table` are from what was expected."""
    apart = table["difference"].abs()
    return (
        f"slice + collectives: {int((apart <= MOST_APART).sum())} of {len(table)} rounds within {MOST_APART:.0%},"
        f" the furthest {apart.max():.1%} away"
    )


def _collectives_us(times: CollectiveTimes, point: dict[str, Any]) -> float:
    target, drafter = TargetConfig.load(K26_SHAPES / "target"), DrafterConfig.load(K26_SHAPES / "drafter")
    target = replace(target, num_hidden_layers=point["layers"])
    rows = point["rows"]
    step = Step.routed(
        target,
        rows,
        point["g"],
        streams=point["streams"],
        context=point["context"],
        ranks=point["ranks"],
        top_k=max(1, rows - 1),
    )
    return times.round_us(target, drafter if rows > 1 else None, step, point["gpus"])
