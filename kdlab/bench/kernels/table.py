"""Rows of the kernel benchmark as one table: time, bound and goal of every arm side by side, and the verdicts."""

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from kdlab.bench.kernels.measured import EAGER, GRAPH, WARM
from kdlab.errors import ArgumentError

MET, MISSED = "met", "missed"
_SIZE_NAMES = {
    "streams": "S", "rows": "N", "prefix": "prefix", "heads": "H", "vocab": "V", "budget": "B", "depth": "L", "k": "K",
    "width": "I", "temperature": "T", "top_p": "top_p", "moved": "moved", "layers": "layers",
}  # fmt: skip


def kernel_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one line an arm and mode.

    Args:
        rows: of one run of `bench_kernels`, of ROWS_FORMAT.

    Returns:
        op, case (the sizes in words), impl, own (whether the arm is kdlab's), mode ("graph", "graph, warm cache" or
        "eager"), us, p10, p90, floor_us, roofline (floor over time), goal_us and verdict ("met" or "missed"; only of
        the arm that the goal is about, in a graph), and one column a size, NaN where an op has no such size.

    Raises:
        ArgumentError: no kernel times among the rows, those of several runs, or an arm twice.
    """
    times = rows[(rows["metric"] == "time_us") & (rows["op"] != "ceiling")]
    if times.empty:
        raise ArgumentError("rows", "rows of bench_kernels", "no kernel times")
    if times["run_id"].nunique(dropna=False) > 1:
        raise ArgumentError("rows", "rows of one run", f"{times['run_id'].nunique(dropna=False)} runs")
    twice = times[times.duplicated(["op", "case", "impl", "method", "graph"])]
    if len(twice):
        raise ArgumentError("rows", "each arm once", " ".join(map(str, twice[["op", "case", "impl", "graph"]].iloc[0])))
    floors = _values(rows[rows["metric"] == "floor_us"])
    goals = _values(rows[rows["metric"] == "goal_us"], "impl")
    table = pd.DataFrame([_line(row, floors, goals) for row in times.to_dict("records")])
    return table.sort_values(
        "op", key=lambda ops: ops.map(list(dict.fromkeys(ops)).index), kind="stable", ignore_index=True
    )


def graph_times(table: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of `kernel_table` to compare: those in a graph, and eager ones of arms that no graph holds."""
    in_graph = table["mode"] == GRAPH
    keys = pd.MultiIndex.from_frame(table[["op", "case", "impl"]])
    return table[in_graph | ~keys.isin(keys[in_graph])]


def with_other_modes(table: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of `graph_times` with two further columns: warm_us and eager_us of the same arm."""
    keys = ["op", "case", "impl"]
    wide = graph_times(table)
    for name, mode in (("warm_us", WARM), ("eager_us", EAGER)):
        others = table.loc[table["mode"] == mode, [*keys, "us"]].rename(columns={"us": name})
        wide = wide.merge(others, on=keys, how="left")
    return wide


def representative_cases(table: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of one case an op: the one nearest to one stream, 33 rows, prefix 4,096 and all heads.

    Args:
        table: from `kernel_table`.
    """
    wanted = {"streams": 1, "rows": 33, "prefix": 4096, "heads": 64}
    hits = table.reindex(columns=list(wanted)).eq(pd.Series(wanted)).sum(axis=1)
    nearest = hits.groupby(table["op"], sort=False).idxmax()
    return table[table["case"].eq(table["op"].map(table.loc[nearest].set_index("op")["case"]))]


def compare_runs(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Return how far the times of two runs lie apart: op, case, impl, own, both times in a graph and their difference.

    Args:
        first, second: rows of `bench_kernels`.

    Returns:
        One line an arm that either timed in a graph, the largest `difference` (of the second from the first, as a share
        of the first) at the top; those that only one of them timed at the end, without a difference.

    Raises:
        ArgumentError: they have no arm in common, or ran on different GPUs.
    """
    gpus = sorted({*first["gpu"].dropna(), *second["gpu"].dropna()})
    if len(gpus) > 1:
        raise ArgumentError("second", "rows of the same GPU", ", ".join(gpus))
    keys = ["op", "case", "impl", "own"]
    tables = [kernel_table(rows).query("mode == @GRAPH")[[*keys, "us"]] for rows in (first, second)]
    both = tables[0].merge(tables[1], on=keys, suffixes=("_first", "_second"), how="outer")
    both["difference"] = both["us_second"] / both["us_first"] - 1.0
    if both["difference"].isna().all():
        raise ArgumentError("second", "times in a graph of arms that the first run has too", "none")
    return both.sort_values("difference", key=abs, ascending=False, ignore_index=True)


def error_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the errors of a run's checks: op, case, impl, own and error."""
    errors = rows[rows["metric"] == "relative_error"]
    cases = [case_words(json.loads(sizes)) for sizes in errors["case"]]
    columns = {"op": errors["op"], "case": cases, "impl": errors["impl"], "own": errors["method"] == "own"}
    return pd.DataFrame({**columns, "error": errors["value"]}).reset_index(drop=True)


def case_text(sizes: Mapping[str, Any]) -> str:
    """Return an op's sizes in words, `S=8 N=33 prefix=4096 H=64`; what is 0, False or without effect is left out."""
    words = []
    for name, value in sizes.items():
        if isinstance(value, str):
            words.append(value)
        elif value is True:
            words.append(name)
        elif value and (name, value) != ("top_p", 1.0):
            words.append(f"{_SIZE_NAMES.get(name, name)}={value:g}")
    return " ".join(words)


def case_words(sizes: Mapping[str, Any]) -> str:
    """Return `case_text` with the names that it shortens first, the others by letter: alike for sizes in any order."""
    names = [name for name in _SIZE_NAMES if name in sizes] + sorted(set(sizes) - set(_SIZE_NAMES))
    return case_text({name: sizes[name] for name in names})


def verdict_lines(table: pd.DataFrame) -> list[str]:
    """Return a sentence a goal that was missed, the worst first, after one that counts those that were met."""
    judged = table[table["verdict"].notna()]
    missed = judged[judged["verdict"] == MISSED]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} goals met"]
    over = (missed["us"] / missed["goal_us"]).sort_values(ascending=False)
    for index, factor in over.items():
        row = missed.loc[index]
        lines.append(
            f"missed by {factor - 1.0:.0%}: {row['op']} {row['case']}, {row['impl']}: "
            f"{row['us']:.1f} us, goal {row['goal_us']:.1f}, floor {row['floor_us']:.1f}"
        )
    return lines


def _values(rows: pd.DataFrame, *more: str) -> dict[tuple[Any, ...], float]:
    names = ["op", "case", *more]
    return {tuple(key): value for *key, value in rows[[*names, "value"]].itertuples(index=False)}


def _line(row: Mapping[str, Any], floors: Mapping[Any, float], goals: Mapping[Any, float]) -> dict[str, Any]:
    key, sizes = (row["op"], row["case"]), json.loads(row["case"])
    floor, in_graph = floors.get(key), row["graph"] == GRAPH
    goal = goals.get((*key, row["impl"])) if in_graph else None
    verdict = None if goal is None else MET if row["median"] <= goal else MISSED
    return {
        "op": row["op"], "case": case_words(sizes), "impl": row["impl"],
        "own": row["method"] == "own", "mode": row["graph"], "us": row["median"], "p10": row["p10"], "p90": row["p90"],
        "floor_us": floor, "roofline": None if floor is None else floor / row["median"], "goal_us": goal,
        "verdict": verdict, **sizes,
    }  # fmt: skip
