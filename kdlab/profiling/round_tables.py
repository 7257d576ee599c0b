"""Launches of a round as the tables that answer where its time goes: stages, gaps, bytes against bounds, matrix units.

Kernels may overlap (programmatic dependent launch: a kernel starts, loads its weights, and waits for the one ahead).
So every instant is counted once, for the launch that began first: the stages and the time without any launch add up to
the round.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kdlab.errors import ArgumentError
from kdlab.profiling.launches import PHASES

IDLE = "nothing runs"
"""Stage and phase of the time in which no launch runs."""
UNMARKED = "outside of stages"
CALLS = "single calls, one an op"
"""Case that `calls_as_round` gives its rows."""
_ROUND = ["case", "mode", "repeat"]
_COUNTED = ("dram_read", "dram_write", "l2_read", "tensor_flops")
_MOST = 0.5
_COPIES = ("Memcpy", "Memset")
"""How the names of copies and fills by the driver begin: they are no kernels, and nothing counts them."""


def timelines(launches: pd.DataFrame) -> pd.DataFrame:
    """Return the launches of rounds whose start is known, with `busy_us`: cases as they come, graph before eager.

    Args:
        launches: of `load_nsight` or `launches_frame`.

    Returns:
        Their columns, by repetition and start, and `busy_us`: microseconds in which the launch runs and none that began
        before it does.

    Raises:
        ArgumentError: timelines of one case and mode by several sources.
    """
    rows = launches[(launches["subject"] == "round") & launches["start_us"].notna()]
    if (rows.groupby(["case", "mode"])["source"].nunique() > 1).any():
        raise ArgumentError("launches", "one source a case and mode", sorted(rows["source"].unique()))
    order = {"first": rows.groupby("case", sort=False).ngroup(), "eager": rows["mode"] != "graph"}
    keys = [*order, "repeat", "start_us", "position"]
    rows = rows.assign(**order).sort_values(keys, kind="stable", ignore_index=True).drop(columns=[*order])
    ends = rows["start_us"] + rows["duration_us"]
    own = [rows[name] for name in _ROUND]
    before = ends.groupby(own).cummax().groupby(own).shift(1)
    return rows.assign(busy_us=(ends - np.maximum(rows["start_us"], before.fillna(-np.inf))).clip(lower=0.0))


def round_times(launches: pd.DataFrame) -> pd.DataFrame:
    """Return one line a timed round: case, mode, repeat, launches, span_us (first start to last end), busy_us, gap_us.

    Args:
        launches: of `load_nsight` or `launches_frame`.
    """
    rows = timelines(launches)
    groups = rows.assign(end=rows["start_us"] + rows["duration_us"]).groupby(_ROUND, sort=False)
    found = groups.agg(
        launches=("position", "size"), begin=("start_us", "min"), end=("end", "max"), busy_us=("busy_us", "sum")
    ).reset_index()
    found["span_us"] = found["end"] - found["begin"]
    found["gap_us"] = found["span_us"] - found["busy_us"]
    return found[[*_ROUND, "launches", "span_us", "busy_us", "gap_us"]]


def middle_times(times: pd.DataFrame) -> pd.DataFrame:
    """Return of the lines of `round_times` those of each case and mode's round of median length, the lower of two."""
    ranked = times.assign(line=range(len(times))).sort_values("span_us", kind="stable")
    groups = ranked.groupby(["case", "mode"], sort=False)
    middle = ranked[groups.cumcount() == (groups["line"].transform("size") - 1) // 2]
    return middle.sort_values("line").drop(columns="line").reset_index(drop=True)


def middle_round(launches: pd.DataFrame, case: str, mode: str) -> pd.DataFrame:
    """Return the launches of the round of median length among a case's repetitions, as `timelines` gives them.

    Raises:
        ArgumentError: no such round was timed.
    """
    times = middle_times(round_times(launches)).query("case == @case and mode == @mode")
    if times.empty:
        raise ArgumentError("case, mode", "a round whose launches were timed", f"{case}, {mode}")
    repeat = times["repeat"].iloc[0]
    rows = timelines(launches)
    return rows[(rows["case"] == case) & (rows["mode"] == mode) & (rows["repeat"] == repeat)].reset_index(drop=True)


def stage_shares(launches: pd.DataFrame) -> pd.DataFrame:
    """Return what each stage takes of the round of median length: the shares of a case and mode add up to 1.

    Args:
        launches: of `load_nsight` or `launches_frame`.

    Returns:
        case, mode, phase, stage, launches, us and share; the phases in the order of a round, the stages in that of
        their first launch, last what no stage marks and the time in which nothing runs.
    """
    found = []
    for case, mode in round_times(launches)[["case", "mode"]].drop_duplicates().itertuples(index=False):
        rows = middle_round(launches, case, mode)
        span = float((rows["start_us"] + rows["duration_us"]).max() - rows["start_us"].min())
        named = rows.assign(stage=rows["stage"].replace("", UNMARKED))
        table = named.groupby(["phase", "stage"], sort=False).agg(launches=("position", "size"), us=("busy_us", "sum"))
        idle = {"phase": IDLE, "stage": IDLE, "launches": 0, "us": max(span - float(table["us"].sum()), 0.0)}
        whole = pd.concat([table.reset_index(), pd.DataFrame([idle])], ignore_index=True)
        found.append(whole.assign(case=case, mode=mode, share=whole["us"] / span))
    if not found:
        return pd.DataFrame(columns=["case", "mode", "phase", "stage", "launches", "us", "share"])
    order = {phase: place for place, phase in enumerate((*PHASES, IDLE))}
    table = pd.concat(found, ignore_index=True)
    table = table.assign(place=table["phase"].map(order), first=table.groupby(["case", "mode"], sort=False).ngroup())
    table = table.sort_values(["first", "place"], kind="stable", ignore_index=True)
    return table[["case", "mode", "phase", "stage", "launches", "us", "share"]]


def stage_traffic(launches: pd.DataFrame) -> pd.DataFrame:
    """Return what each stage of a counted round moved and computed, beside the fewest bytes and the time it took.

    Args:
        launches: of `load_nsight` or `launches_frame`; their provenance may hold "floors" ({case: {stage: [bytes,
            operations, launches]}}, of `kdlab.study.step_cost.round_stages`).

    Returns:
        case, phase, stage, launches, bytes (read from and written to the memory), l2_read, flops, flops_counted (False:
        those that the stage needs at least, NaN where no floor says), floor_bytes (NaN likewise), us and timed: the
        mode whose timeline the microseconds are of, "ncu" (each kernel alone, with cold caches) where no timeline holds
        the stage with as many kernels as were counted. Where one holds more, floor_bytes is NaN: counting was cut off.
    """
    rows = launches[(launches["subject"] == "round") & (launches["source"] == "ncu") & (launches["stage"] != "")]
    timed = _timed_stages(launches)
    groups = rows.groupby(["case", "stage"], sort=False)
    lines = [_traffic(case, stage, group, timed) for (case, stage), group in groups]
    names = ["case", "phase", "stage", "launches", "bytes", "l2_read", "flops", "flops_counted", "floor_bytes", "us",
             "timed"]  # fmt: skip
    return pd.DataFrame(lines, columns=names)


def counted_case(launches: pd.DataFrame) -> str | None:
    """Return the first round of which the stages that take most of its time were counted whole; None if there is none.

    Args:
        launches: of `load_nsight` or `launches_frame`.
    """
    prefills = set(launches.loc[launches["phase"] == "prefill", "case"])
    shares = stage_shares(launches).set_index(["case", "mode", "stage"])["share"]
    for case, rows in stage_traffic(launches).groupby("case", sort=False):
        known = [shares[case, row.timed, row.stage] for row in rows.itertuples() if row.timed != "ncu"]
        watched = case in shares.index.get_level_values("case")
        if case not in prefills and (not watched or sum(known) > _MOST):
            return str(case)
    return None


def calls_as_round(launches: pd.DataFrame) -> pd.DataFrame:
    """Return the counted calls of ops, the first of each op, as if they were the stages of one round named `CALLS`.

    The other tables and their figures can then be made of them, where no round was counted whole.

    Args:
        launches: of `load_nsight` or `launches_frame`.
    """
    rows = launches[(launches["subject"] == "kernels") & (launches["source"] == "ncu")]
    rows = rows[rows["case"] == rows.groupby("stage")["case"].transform("first")]
    facts = [json.loads(text) for text in rows["provenance"]]
    stages = rows["case"].str.removesuffix(" (cuda)")
    floors = [
        one | {"floors": {CALLS: {stage: (one.get("floors") or {}).get(case, {}).get(op)}}}
        for one, stage, case, op in zip(facts, stages, rows["case"], rows["stage"], strict=True)
    ]
    return rows.assign(subject="round", case=CALLS, stage=stages, provenance=[json.dumps(one) for one in floors])


def kernel_use(launches: pd.DataFrame) -> pd.DataFrame:
    """Return how busy each kernel of a counted round kept the matrix units and the memory.

    Args:
        launches: of `load_nsight` or `launches_frame`.

    Returns:
        case, kernel, stages (their names), launches, us (each launch alone, cold caches), share of the case's us,
        tensor_pct and dram_pct (means over the kernel's time); the largest share of a case first.
    """
    rows = launches[(launches["subject"] == "round") & (launches["source"] == "ncu")]
    weighted = rows.assign(**{name: rows[name] * rows["duration_us"] for name in ("tensor_pct", "dram_pct")})
    groups = weighted.groupby(["case", "kernel"], sort=False)
    found = groups.agg(launches=("position", "size"), us=("duration_us", "sum")).reset_index()
    found["stages"] = groups["stage"].agg(lambda names: ", ".join(dict.fromkeys(filter(None, names)))).to_numpy()
    for name in ("tensor_pct", "dram_pct"):
        sums = groups[name].apply(lambda values: values.sum(min_count=len(values)))
        found[name] = sums.to_numpy(dtype=float) / found["us"]
    found["share"] = found["us"] / found.groupby("case")["us"].transform("sum")
    found["first"] = found.groupby("case", sort=False).ngroup()
    found = found.sort_values(["first", "share"], ascending=[True, False], kind="stable", ignore_index=True)
    return found[["case", "kernel", "stages", "launches", "us", "share", "tensor_pct", "dram_pct"]]


def _timed_stages(launches: pd.DataFrame) -> dict[tuple[str, str], dict[str, tuple[int, float]]]:
    """(case, stage) to mode to kernels and microseconds in the round of median length; graph before eager."""
    found: dict[tuple[str, str], dict[str, tuple[int, float]]] = {}
    for case, mode in round_times(launches)[["case", "mode"]].drop_duplicates().itertuples(index=False):
        rows = middle_round(launches, case, mode)
        for stage, group in rows.groupby("stage"):
            kernels = int((~group["kernel"].str.startswith(_COPIES)).sum())
            found.setdefault((case, stage), {})[mode] = (kernels, float(group["busy_us"].sum()))
    return found


def _traffic(
    case: str, stage: str, group: pd.DataFrame, timed: Mapping[tuple[str, str], Mapping[str, tuple[int, float]]]
) -> dict[str, Any]:
    sums = {name: float(group[name].sum(min_count=len(group))) for name in _COUNTED}
    floors = json.loads(group["provenance"].iloc[0]).get("floors") or {}
    floor_bytes, floor_flops, _ = floors.get(case, {}).get(stage) or (np.nan, np.nan, 0)
    modes = timed.get((case, stage), {})
    alike = [(mode, us) for mode, (kernels, us) in modes.items() if kernels == len(group)]
    mode, us = alike[0] if alike else ("ncu", float(group["duration_us"].sum()))
    counted = bool(np.isfinite(sums["tensor_flops"]))
    return {
        "case": case, "phase": group["phase"].iloc[0], "stage": stage, "launches": len(group),
        "bytes": sums["dram_read"] + sums["dram_write"], "l2_read": sums["l2_read"],
        "flops": sums["tensor_flops"] if counted else float(floor_flops), "flops_counted": counted,
        "floor_bytes": float(floor_bytes) if alike or not modes else np.nan, "us": us, "timed": mode,
    }  # fmt: skip
