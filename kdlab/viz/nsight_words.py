"""What the tables of a profiled round say, in sentences."""

import pandas as pd

from kdlab.profiling.round_tables import IDLE

_IN_WORDS = {"graph": "as one CUDA graph", "eager": "launched one by one"}


def round_findings(shares: pd.DataFrame, times: pd.DataFrame) -> str:
    """Say how long each round is, which phases and stage take most of it, and for how long nothing runs, as Markdown.

    Args:
        shares: of `kdlab.profiling.stage_shares`.
        times: of `kdlab.profiling.round_times`.
    """
    lines = []
    for (case, mode), rows in shares.groupby(["case", "mode"], sort=False):
        work = rows[rows["phase"] != IDLE]
        phases = work.groupby("phase")["share"].sum().sort_values(ascending=False).head(2)
        largest, idle = work.loc[work["share"].idxmax()], rows[rows["phase"] == IDLE].iloc[0]
        spans = times.loc[(times["case"] == case) & (times["mode"] == mode), "span_us"]
        of_phases = ", ".join(f"{phase} {share:.0%}" for phase, share in phases.items())
        lines.append(
            f"- {case}, {_IN_WORDS[mode]}: **{rows['us'].sum():,.0f} µs** (of {len(spans)} rounds, {spans.min():,.0f} "
            f"to {spans.max():,.0f}), {of_phases}; the largest stage is {largest['stage']} with "
            f"{largest['share']:.0%}. Nothing runs for **{idle['us']:,.0f} µs** ({idle['share']:.1%}) between "
            f"{work['launches'].sum()} launches."
        )
    return "\n".join(lines)


def counter_findings(traffic: pd.DataFrame, kernels: pd.DataFrame) -> str:
    """Say which stage moves most beyond its least, and how busy the kernel with the most time keeps the card.

    Args:
        traffic: lines of one case of `kdlab.profiling.stage_traffic`.
        kernels: lines of the same case of `kdlab.profiling.kernel_use`.
    """
    lines = []
    known = traffic[traffic["floor_bytes"].gt(0) & traffic["bytes"].notna()]
    if len(known):
        total, least = known["bytes"].sum(), known["floor_bytes"].sum()
        worst = known.loc[(known["bytes"] - known["floor_bytes"]).idxmax()]
        lines.append(
            f"- {total / 1e9:,.2f} GB go to and from memory, **{total / least:.2f} times** the least; the most beyond "
            f"it by {worst['stage']}: {worst['bytes'] / 1e6:,.0f} MB, least {worst['floor_bytes'] / 1e6:,.0f} MB."
        )
    for row in kernels.head(1).itertuples():
        parts = {"matrix units": row.tensor_pct, "memory": row.dram_pct}
        busy = " and ".join(f"the {part} **{value:.0f} %**" for part, value in parts.items() if pd.notna(value))
        kept = f"keeps {busy} busy" if busy else "was not counted"
        lines.append(f"- {row.kernel} takes {row.share:.0%} of the kernels' time and {kept}.")
    return "\n".join(lines)
