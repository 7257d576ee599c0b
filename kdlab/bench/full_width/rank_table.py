"""Rounds over real ranks beside what one rank's slice and the times of collectives let expect."""

from dataclasses import replace
from typing import Any

import pandas as pd

from kdlab.bench.collectives import CollectiveTimes
from kdlab.bench.full_width.table import KEYS, with_case
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.paths import K26_SHAPES
from kdlab.study.collectives import experts_are_products, fit_waits
from kdlab.study.recorded_rounds import recorded_step
from kdlab.study.step_cost import all_reduces

MOST_APART = 0.05
"""Share of the expected time up to which a slice scaled up stands for rounds over its ranks."""


def rank_table(rows: pd.DataFrame, collectives: pd.DataFrame) -> pd.DataFrame:
    """Return one line a point that several GPUs ran.

    Args:
        rows: of `bench_round` over real ranks; others among them are passed over.
        collectives: of `bench_collectives` over as many ranks.

    Returns:
        KEYS, us (the round), slice_us (the same without collectives), collectives_us (what chains of them let expect),
        inside_us (us - slice_us), waits_us (what a round waits for its all-reduces beside them, `fit_waits` of all
        lines) and difference: of us from slice_us + collectives_us + waits_us, as a share of that sum.

    Raises:
        ArgumentError: collectives of so many ranks, or of such sizes, were not timed.
    """
    table, times = with_case(rows), CollectiveTimes(collectives)
    timed = table[table["gpus"] > 1].set_index(KEYS)
    found = timed.loc[timed["metric"] == "round", ["value"]].rename(columns={"value": "us"})
    found["slice_us"] = timed.loc[timed["metric"] == "slice", "value"]
    found = found.dropna().reset_index()
    alone = [_collectives(times, point) for point in found[KEYS].to_dict("records")]
    found["collectives_us"] = [us for us, _, _ in alone]
    found["inside_us"] = found["us"] - found["slice_us"]
    expected = found["slice_us"] + found["collectives_us"]
    calls = pd.Series([number for _, number, _ in alone], dtype=float)
    many = pd.Series([products for _, _, products in alone], dtype=bool)
    wait_us, many_wait_us = fit_waits(found["us"], expected, calls, many) if len(calls) else (0.0, 0.0)
    found["waits_us"] = calls * many.map({False: wait_us, True: many_wait_us})
    found["difference"] = found["us"] / (expected + found["waits_us"]) - 1.0
    return found


def rank_verdict(table: pd.DataFrame) -> str:
    """Say how far the points of `rank_table` are from what was expected, without waits and with them."""
    apart = table["difference"].abs()
    without = table["us"] / (table["slice_us"] + table["collectives_us"]) - 1.0
    return (
        f"slice + collectives: {int((without.abs() <= MOST_APART).sum())} of {len(table)} rounds within "
        f"{MOST_APART:.0%}, {without.min():+.1%} to {without.max():+.1%}; with a wait for each all-reduce, fitted to "
        f"these rounds (one where experts are products of matrices, one elsewhere): "
        f"{int((apart <= MOST_APART).sum())}, the furthest {apart.max():.1%} away"
    )


def _collectives(times: CollectiveTimes, point: dict[str, Any]) -> tuple[float, int, bool]:
    """Microseconds of a round's collectives alone, how many are all-reduces, and whether experts are products."""
    target, drafter = TargetConfig.load(K26_SHAPES / "target"), DrafterConfig.load(K26_SHAPES / "drafter")
    target, step = replace(target, num_hidden_layers=point["layers"]), recorded_step(point, target)
    drafts = drafter if point["rows"] > 1 else None
    us, (calls, _) = times.round_us(target, drafts, step, point["gpus"]), all_reduces(target, drafts, step)
    return us, calls, experts_are_products(target, step)
