"""The short table of a profile: what each stage takes, from the timeline where there is one, and what was counted."""

import numpy as np
import pandas as pd

from kdlab.profiling.launches import PHASES
from kdlab.profiling.round_tables import UNMARKED, middle_times, round_times, stage_shares


def summary_table(launches: pd.DataFrame) -> pd.DataFrame:
    """Return one line a case and stage.

    Args:
        launches: of `load_nsight` or `launches_frame`.

    Returns:
        case, mode, stage, launches, us and share of the round of median length in the timeline (of a captured round
        where there is one); and of the counted launches, each alone with cold caches: alone_us, GB_s (bytes to and from
        the memory over that) and tensor_pct (mean over the kernels' time). What is not known is NaN.
    """
    counted, timed = _counted(launches), pd.concat([stage_shares(launches), _timed_kernels(launches)])
    timed = timed[timed["mode"] == timed.groupby("case")["mode"].transform("max")]  # graph is the last in the alphabet
    columns = ["case", "mode", "phase", "stage", "launches", "us", "share"]
    found = timed[columns].merge(counted, on=["case", "stage"], how="outer", suffixes=("", "_counted"), sort=False)
    for name in ("mode", "phase", "launches"):
        found[name] = found[name].fillna(found.pop(f"{name}_counted"))
    keys = pd.concat([timed, counted])[["case", "stage"]].drop_duplicates()  # in the order of their launches
    found = keys.merge(found, on=["case", "stage"], how="left")
    phases = {phase: place for place, phase in enumerate(PHASES)}
    first, place = found.groupby("case", sort=False).ngroup(), found["phase"].map(phases).fillna(len(phases))
    found = found.assign(first=first, place=place).sort_values(["first", "place"], kind="stable", ignore_index=True)
    return found[["case", "mode", "stage", "launches", "us", "share", "alone_us", "GB_s", "tensor_pct"]]


def summary_lines(launches: pd.DataFrame) -> list[str]:
    """Say of every timed round how long the device was busy, and what lay between its launches."""
    return [
        f"{row.case}, {row.mode}: {row.span_us:.0f} us, {row.busy_us / row.span_us:.1%} of it busy; "
        f"{row.gap_us:.0f} us between {row.launches} launches"
        for row in middle_times(round_times(launches)).itertuples()
    ]


def _timed_kernels(launches: pd.DataFrame) -> pd.DataFrame:
    """Calls of ops that were timed and not counted: the median of their repetitions."""
    rows = launches[(launches["subject"] == "kernels") & launches["start_us"].notna()]
    keys = ["case", "mode", "phase", "stage"]
    calls = rows.groupby([*keys, "repeat"], sort=False).agg(launches=("position", "size"), us=("duration_us", "sum"))
    return calls.groupby(keys, sort=False).median().reset_index().assign(share=1.0)


def _counted(launches: pd.DataFrame) -> pd.DataFrame:
    rows = launches[launches["source"] == "ncu"]
    keys = ["case", "mode", "phase", "stage"]
    moved, work = rows["dram_read"] + rows["dram_write"], rows["tensor_pct"] * rows["duration_us"]
    groups = rows.assign(moved=moved, work=work, stage=rows["stage"].replace("", UNMARKED)).groupby(keys, sort=False)
    found = groups.agg(launches=("position", "size"), alone_us=("duration_us", "sum")).reset_index()
    for name in ("moved", "work"):
        found[name] = groups[name].apply(lambda values: values.sum(min_count=len(values))).to_numpy(dtype=float)
    found["GB_s"] = np.divide(found.pop("moved"), 1e3 * found["alone_us"])
    found["tensor_pct"] = np.divide(found.pop("work"), found["alone_us"])
    return found
