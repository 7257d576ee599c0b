"""`python -m kdlab.report.kernel_page`: writes the recorded kernel times into the marked places of the pages."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from kdlab.bench.kernels.table import MET, graph_times, kernel_table, with_other_modes
from kdlab.bench.rows import read_rows
from kdlab.errors import ArgumentError
from kdlab.paths import DATA, REPOSITORY
from kdlab.report.marked_places import fill_places, markdown_table, write_pages

ROWS = DATA / "recorded" / "kernels-h200.parquet"
PAGES = tuple(REPOSITORY / name for name in ("README.md", "docs/kernels.md", "docs/kernel-times.md"))
SELECTED = (
    ("draft_topk", "S=1 N=15 V=163840 K=64"),
    ("target_sample", "S=1 N=33 V=163840"),
    ("target_sample", "S=1 N=33 V=163840 T=1"),
    ("target_sample", "S=1 N=33 V=163840 T=1 top_p=0.95"),
    ("tree_build", "S=1 B=64 L=15 K=64 peaked"),
    ("tree_build", "S=1 B=1024 L=15 K=64 peaked"),
    ("tree_accept", "S=8 N=64 L=15"),
    ("kv_commit", "S=1 moved=8 layers=61"),
    ("moe_int4", "S=1 N=1 I=2048 uniform"),
    ("moe_int4", "S=1 N=33 I=2048 uniform"),
    ("moe_int4", "S=1 N=1 I=256 uniform"),
    ("moe_int4", "S=1 N=33 I=256 uniform"),
    ("verify_attention", "S=1 N=33 prefix=4096 H=64"),
    ("verify_attention", "S=1 N=33 prefix=65536 H=64"),
    ("verify_attention", "S=8 N=33 prefix=4096 H=64"),
    ("verify_attention", "S=1 N=33 prefix=4096 H=8"),
)
_MAIN_ARMS = ("wgmma", "cuda")
_SMALL_US = 20
_SOURCES = ("gpu", "started_utc", "commit", "driver", "torch")


def fill(text: str, rows: pd.DataFrame) -> str:
    """Return a page's text with every marked place written anew from `rows`.

    Raises:
        ArgumentError: a place has an unknown name, or the rows lack a case that it shows.
    """
    table = graph_times(kernel_table(rows))
    return fill_places(text, "kernels", {name: partial(make, rows, table) for name, make in _MAKERS.items()})


def _source(rows: pd.DataFrame, table: pd.DataFrame) -> str:
    gpu, started, commit, driver, torch = (rows[name].iloc[0] for name in _SOURCES)
    cases = len(table[["op", "case"]].drop_duplicates())
    return (
        f"One {gpu}, {started[:10]}, commit {commit[:7]}, driver {driver}, torch {torch}: {cases} cases, "
        f"{len(table)} arms. Rates measured in the same run: {_ceilings(rows)}."
    )


def _ceilings(rows: pd.DataFrame) -> str:
    found = rows[rows["op"] == "ceiling"]
    parts = zip(found["case"], found["value"], found["unit"], strict=True)
    return ", ".join(f"{json.loads(case)['of']} {value:.3g} {unit}" for case, value, unit in parts)


def _goals(rows: pd.DataFrame, table: pd.DataFrame) -> str:
    judged = table[table["verdict"].notna()]
    counts = judged.assign(met=judged["verdict"] == MET).groupby("op", sort=False)["met"].agg(["sum", "count"])
    body = [[f"`{op}`", str(met), str(count)] for op, met, count in counts.itertuples()]
    total = ["all", str(counts["sum"].sum()), str(counts["count"].sum())]
    return markdown_table(["op", "goals met", "of"], [*body, total])


def _verdict(rows: pd.DataFrame, table: pd.DataFrame) -> str:
    judged = table[table["verdict"].notna()]
    return (
        f"On the {rows['gpu'].iloc[0].removeprefix('NVIDIA ')} ({rows['started_utc'].iloc[0][:10]}) "
        f"{(judged['verdict'] == MET).sum()} of {len(judged)} goals are met. {_against_flashmla(rows, table)}"
    )


def _against_flashmla(rows: pd.DataFrame, table: pd.DataFrame) -> str:
    own, peer = (table[table["impl"] == arm].set_index("case")["us"] for arm in ("wgmma", "flashmla prefix"))
    ratio = (own / peer).dropna()
    return (
        f"Tree and mask included, `wgmma` takes {ratio.median():.2f} times FlashMLA's time over the prefix alone in "
        f"the median of {len(ratio)} shapes ({ratio.min():.2f} to {ratio.max():.2f}; faster in {(ratio < 1).sum()})."
    )


def _eager(rows: pd.DataFrame, table: pd.DataFrame) -> str:
    modes = with_other_modes(kernel_table(rows))
    small = modes[modes["own"] & (modes["us"] < _SMALL_US)]["eager_us"].dropna()
    return (
        f"Called eagerly, as rounds with `graph=\"off\"` are, kernels of less than {_SMALL_US} microseconds take "
        f"{small.median():.0f} in the median of {len(small)} ({small.min():.0f} to {small.max():.0f}): the host's time."
    )


def _selected(rows: pd.DataFrame, table: pd.DataFrame) -> str:
    cases = [table[(table["op"] == op) & (table["case"] == case)] for op, case in SELECTED]
    missing = [case for case, arms in zip(SELECTED, cases, strict=True) if arms.empty]
    if missing:
        raise ArgumentError("rows", f"times of {missing[0]}", "none")
    lines = [[f"`{op}`", *_line(arms)] for (op, _), arms in zip(SELECTED, cases, strict=True)]
    return markdown_table(["op", *_COLUMNS], lines)


def _every(rows: pd.DataFrame, table: pd.DataFrame) -> str:
    parts = []
    for op, of_op in table.groupby("op", sort=False):
        lines = [_line(arms) for _, arms in of_op.groupby("case", sort=False)]
        parts.append(f"## {op}\n\n{markdown_table(list(_COLUMNS), lines)}")
    return "\n" + "\n\n".join(parts) + "\n"


_COLUMNS = ("case", "kdlab", "p10 to p90", "floor", "goal", "other arms")


def _line(arms: pd.DataFrame) -> list[str]:
    """One case: kdlab's arm that the goal is about, else its first of `_MAIN_ARMS`; the others behind it."""
    main = next(arms[arms["impl"] == name].iloc[0] for name in _MAIN_ARMS if (arms["impl"] == name).any())
    goal = "-" if pd.isna(main["goal_us"]) else f"{_us(main['goal_us'])}, {main['verdict']}"
    others = arms[arms["impl"] != main["impl"]]
    named = ", ".join(f"{name} {_us(us)}" for name, us in zip(others["impl"], others["us"], strict=True))
    spread = f"{_us(main['p10'])} to {_us(main['p90'])}"
    return [main["case"], _us(main["us"]), spread, _us(main["floor_us"]), goal, named or "-"]


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


_MAKERS: dict[str, Callable[[pd.DataFrame, pd.DataFrame], str]] = {
    "source": _source, "goals": _goals, "verdict": _verdict, "flashmla": _against_flashmla, "eager": _eager,
    "selected": _selected, "every": _every,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages; returns 0."""
    text = "Write the recorded kernel times into the pages that quote them."
    parser = argparse.ArgumentParser(prog="python -m kdlab.report.kernel_page", description=text)
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    parser.add_argument("--rows", type=Path, default=ROWS, help="a file that kdlab bench kernels wrote")
    options = parser.parse_args(arguments)
    write_pages(partial(fill, rows=read_rows(options.rows)), options.pages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
