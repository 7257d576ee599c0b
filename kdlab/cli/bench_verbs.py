"""`kdlab bench`: measurements of this machine, as a table and as result rows."""

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from kdlab.cli.output import Progress, print_json, print_table, say
from kdlab.errors import KdlabError, UnsupportedDevice

if TYPE_CHECKING:
    import pandas as pd


def run_bench_kernels(arguments: argparse.Namespace) -> int:
    """Time the CUDA ops beside their peers; print one table, the verdicts, and what was left out."""
    from kdlab.bench import write_rows
    from kdlab.bench.kernels import bench_kernels, kernel_table, verdict_lines, with_other_modes

    chosen = {name: value for name in ("ops", "heads") if (value := getattr(arguments, name)) is not None}
    found = bench_kernels(seconds=arguments.seconds, **chosen, progress=Progress("bench kernels", "cases"))
    if arguments.out:
        write_rows(found.rows, arguments.out)
    if found.fault:
        say(f"the device failed at {found.fault}; what was timed before stands")
    table, ceilings = kernel_table(found.rows), _ceilings(found.rows)
    verdicts = verdict_lines(table)
    if arguments.json:
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
        print_json({"ceilings": ceilings, "rows": rows, "verdicts": verdicts, "messages": found.messages,
                    "fault": found.fault})  # fmt: skip
        return 1 if found.fault else 0
    print_table([_printed(row) for row in with_other_modes(table).to_dict("records")])
    print()
    for ceiling in ceilings:
        print(f"{ceiling['of']}: {ceiling['value']:.2f} {ceiling['unit']} ({ceiling['what']})")
    for line in [*verdicts, *found.messages]:
        print(line)
    return 1 if found.fault else 0


def run_bench_rounds(arguments: argparse.Namespace) -> int:
    """Time live rounds of a small pair; print a line an arm, and the device's rounds against the host's."""
    import kdlab
    from kdlab.bench import write_rows
    from kdlab.bench.mini_rounds import bench_mini_rounds, mini_prompts, mini_table, verdict_lines
    from kdlab.checks import check_int

    prompts = mini_prompts(arguments.prompts)
    for option in ("max_new_tokens", "repeats"):
        check_int(f"--{option.replace('_', '-')}", getattr(arguments, option), minimum=1)
    pair = kdlab.load_pair(arguments.target, device="cuda", dtype="bfloat16")
    rows = bench_mini_rounds(
        pair,
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        progress=Progress("bench rounds", "decodes"),
    )
    if arguments.out:
        write_rows(rows, arguments.out)
    table = mini_table(rows)
    lines = verdict_lines(table)
    if arguments.json:
        print_json({"rows": table.to_dict("records"), "verdicts": lines})
        return 0
    numbers = {"tokens_per_s": "8.0f", "tokens_per_round": "6.2f", "round_us": "8.1f", "p10": "8.1f", "p90": "8.1f"}
    found = table.to_dict("records")
    print_table([row | {name: format(row[name], form) for name, form in numbers.items()} for row in found])
    for line in lines:
        print(line)
    return 0


def run_bench_counters(arguments: argparse.Namespace) -> int:
    """Count what the attention kernels read, under Nsight Compute; print one line an implementation."""
    from kdlab.bench import write_rows
    from kdlab.bench.kernels import COUNTED_ARMS, COUNTED_SIZES, counted_command, counter_rows
    from kdlab.bench.timing import require_gpu
    from kdlab.profiling import collect_counters

    require_gpu("hardware counters")
    op = "verify_attention"
    counted = {}
    for arm in COUNTED_ARMS:
        try:
            counted[arm] = collect_counters(counted_command(op, arm, COUNTED_SIZES))
        except UnsupportedDevice:
            raise
        except KdlabError as failure:  # one that this GPU cannot run; the others can
            say(f"{arm}: {failure}")
    if not counted:
        raise KdlabError("hardware counters: no implementation could be counted")
    rows = counter_rows(op, COUNTED_SIZES, counted)
    if arguments.out:
        write_rows(rows, arguments.out)
    table = rows.pivot_table(index=["impl", "note"], columns="metric", values="value", sort=False).reset_index()
    if arguments.json:
        print_json({"op": op, "case": COUNTED_SIZES, "rows": table.to_dict("records")})
    else:
        print_table(table.to_dict("records"))
    return 0


def run_bench_compare(arguments: argparse.Namespace) -> int:
    """Say how far the kernel times of two runs lie apart; status 1 when one is further than the tolerance."""
    from kdlab.bench import read_rows
    from kdlab.bench.kernels import compare_runs
    from kdlab.checks import check_float

    tolerance = check_float("tolerance", arguments.tolerance, minimum=0.0)
    apart = compare_runs(read_rows(arguments.first), read_rows(arguments.second))
    alone = int(apart["difference"].isna().sum())
    apart = apart[apart["difference"].notna()]
    beyond = int((apart["difference"].abs() > tolerance).sum())
    if arguments.json:
        found = {"tolerance": tolerance, "beyond": beyond, "in one run only": alone}
        print_json({**found, "rows": apart.to_dict("records")})
    else:
        print_table(apart.head(max(beyond, 5)).to_dict("records"))
        print(f"{len(apart) - beyond} of {len(apart)} graph times agree within {tolerance:.0%}; above, the furthest")
        if alone:
            print(f"{alone} arms were timed in one run only")
    return 1 if beyond else 0


def _ceilings(rows: "pd.DataFrame") -> list[dict[str, Any]]:
    measured = rows[rows["op"] == "ceiling"]
    return [{**json.loads(row["case"]), "value": row["value"], "unit": row["unit"]} for _, row in measured.iterrows()]


def _printed(row: dict[str, Any]) -> dict[str, str]:
    """A line of the printed table: microseconds to a hundredth, the fraction of the roofline in percent."""
    names = ("us", "p10", "p90", "warm_us", "eager_us", "floor_us", "goal_us")
    times = {name: f"{row[name]:9.2f}" if _is_known(row[name]) else "" for name in names}
    goal, roofline = times.pop("goal_us"), f"{100.0 * row['roofline']:7.1f} %" if _is_known(row["roofline"]) else ""
    words = {name: row[name] for name in ("op", "case", "impl", "mode")}
    verdict = row["verdict"] if isinstance(row["verdict"], str) else ""
    return {**words, **times, "roofline": roofline, "goal_us": goal, "goal": verdict}


def _is_known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)
