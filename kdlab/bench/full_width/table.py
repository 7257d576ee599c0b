"""Tables of the full-width benchmark: one line a point with its goal, one a stage, one a part of a stage."""

import json

import numpy as np
import pandas as pd

from kdlab.bench.row_rules import POINT_METRICS
from kdlab.errors import ArgumentError

KEYS = ["rows", "streams", "context", "g", "experts", "ranks", "layers", "gpus"]
"""What tells points apart; `gpus` of `ranks` ran."""
GOALS = ((33, 1.35), (8, 1.45), (1, 1.6))
"""(rows from, most that the sum of stages may be over the sum of floors), for contexts to 8,192."""
GOAL_CONTEXT, GOAL_GPU = 8192, "H200"
MOST_GAP = 0.02
"""What the host may add to a round in its loop."""


def goal_of(rows: int, context: int) -> float:
    """Return the most that stages may take over their floors; NaN where no goal is set."""
    if context > GOAL_CONTEXT or 4 < rows < 8 or 17 < rows < 33:
        return float("nan")
    return next(goal for least, goal in GOALS if rows >= least)


def point_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one line a point.

    Args:
        rows: of `bench_round`.

    Returns:
        KEYS, us with p10 and p90 (the round in one graph), floor_us, stages_us (their sum, NaN where they were not
        timed), over_floor (stages over floors), goal, met (NaN: none set or not timed), unrested (share that launches
        in a row take over `us`, whose samples have rests between them), gap (share that the host's copies and reads
        add to launches in a row) and collectives_us (modelled; NaN where they are inside the round).
    """
    table = with_case(rows)
    whole = table[table["metric"] == "round"].set_index(KEYS)
    found = whole[["value", "p10", "p90"]].rename(columns={"value": "us"})
    for metric in ("floor", "loop", "row", "collectives"):
        found[f"{metric}_us"] = table[table["metric"] == metric].set_index(KEYS)["value"]
    found["stages_us"] = table[table["metric"] == "stage"].groupby(KEYS)["value"].sum()
    found = found.reset_index()
    found["over_floor"] = found["stages_us"] / found["floor_us"]
    found["goal"] = [goal_of(n, context) for n, context in zip(found["rows"], found["context"], strict=True)]
    judged = found["goal"].notna() & found["over_floor"].notna()
    found["met"] = np.where(judged, found["over_floor"] <= found["goal"], np.nan)
    found["unrested"] = found["row_us"] / found["us"] - 1.0
    found["gap"] = found["loop_us"] / found["row_us"] - 1.0
    return found.drop(columns=["loop_us", "row_us"])


def stage_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one line a point and stage: KEYS, stage, us, floor_us (0 for what no floor asks for) and over_us."""
    return _over_floors(with_case(rows), "stage", [*KEYS, "stage"])


def part_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one line a point and part of a stage, timed by itself: KEYS, part, stage, us, floor_us and over_us.

    A part is in the time and the floor of the stage that it names, and in no sum beside it.
    """
    return _over_floors(with_case(rows), "part", [*KEYS, "part", "stage"])


def _over_floors(table: pd.DataFrame, metric: str, keys: list[str]) -> pd.DataFrame:
    found = table[table["metric"] == metric].set_index(keys)[["value"]].rename(columns={"value": "us"})
    found["floor_us"] = table[table["metric"] == f"{metric} floor"].set_index(keys)["value"]
    found["floor_us"] = found["floor_us"].fillna(0.0)
    found["over_us"] = found["us"] - found["floor_us"]
    return found.reset_index()


def jumps(points: pd.DataFrame, most: float = 0.10) -> pd.DataFrame:
    """Return neighbouring row counts whose time grows by more than `most` beyond what their floors do.

    Args:
        points: of `point_table`.
        most: as a share.

    Returns:
        rows, next_rows, streams, context, g, experts, time (ratio of the times) and floor (of the floors).
    """
    found = []
    for key, group in points.groupby(["streams", "context", "g", "experts"], sort=False):
        ordered = group[group["rows"] > 1].sort_values("rows")  # AR runs no drafter
        for one, two in zip(ordered.iloc[:-1].itertuples(), ordered.iloc[1:].itertuples(), strict=True):
            time, floor = two.us / one.us, two.floor_us / one.floor_us
            if time > floor * (1.0 + most):
                found.append((one.rows, two.rows, *key, time, floor))
    names = ["rows", "next_rows", "streams", "context", "g", "experts", "time", "floor"]
    return pd.DataFrame(found, columns=names)


def verdict_lines(points: pd.DataFrame) -> list[str]:
    """Say how many goals are met, how often a time jumps, and what the host adds."""
    judged, jumped = points["met"].dropna(), len(jumps(points))
    return [
        f"stages over floors: {int(judged.sum())} of {len(judged)} goals met",
        f"neighbouring row counts: {jumped} jumps above 10 % that the floors do not have",
        _host_line(points),
    ]


def _host_line(points: pd.DataFrame) -> str:
    """Say how many of the engine's loops keep to launches in a row, and what these take over rested ones."""
    told = points.dropna(subset=["gap"])
    if told.empty:
        return "host: not told, launches in a row were not timed"
    met = int((told["gap"] <= MOST_GAP).sum())
    return (
        f"host: it adds at most {MOST_GAP:.0%} to {met} of {len(told)} rounds, {told['gap'].max():.1%} to the worst; "
        f"without rests the GPU itself takes {told['unrested'].min():+.1%} to {told['unrested'].max():+.1%}"
    )


def with_case(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of rounds with a column for each word of their cases: of one GPU, no stage, no part without.

    Raises:
        ArgumentError: there are none, or one is there twice.
    """
    own = rows[(rows["op"] == "round") & rows["metric"].isin(POINT_METRICS)]
    if own.empty:
        raise ArgumentError("rows", "rows of `kdlab bench round`", "none")
    said_nothing = {"gpus": 1, "stage": "", "part": ""}
    cases = pd.DataFrame([said_nothing | json.loads(case) for case in own["case"]], index=own.index)
    found = own.drop(columns=[name for name in cases.columns if name in own.columns]).join(cases)
    twice = found[found.duplicated([*KEYS, "stage", "part", "metric"])]
    if len(twice):
        raise ArgumentError("rows", "each time once", f"{twice['metric'].iloc[0]} of {twice['case'].iloc[0]} twice")
    return found
