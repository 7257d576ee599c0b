"""`kdlab bench round`: a round of Kimi K2.6 at its true shapes."""

import argparse

from kdlab.cli.output import Progress, print_json, print_table, say


def run_bench_round(arguments: argparse.Namespace) -> int:
    """Time rounds of one rank's slice; print a line a point, the slowest stages against their floors, the goals."""
    from kdlab.bench import write_rows
    from kdlab.bench.full_width.suite import bench_round
    from kdlab.bench.full_width.table import point_table, stage_table, verdict_lines

    found = bench_round(
        ranks=arguments.ranks,
        experts=arguments.experts,
        layers=arguments.layers,
        seconds=arguments.seconds,
        progress=Progress("bench round", "points"),
    )
    if found.rows.empty:
        for line in found.messages:
            say(line)
        return 1
    if arguments.out:
        write_rows(found.rows, arguments.out)
    points, stages = point_table(found.rows), stage_table(found.rows)
    verdicts = verdict_lines(points)
    if arguments.json:
        documents = {"points": points, "stages": stages}
        plain = {name: table.astype(object).where(table.notna(), None).to_dict("records")
                 for name, table in documents.items()}  # fmt: skip
        print_json(plain | {"verdicts": verdicts, "messages": found.messages})
        return 0
    print_table([_printed(row) for row in points.to_dict("records")])
    print()
    slow = stages.groupby("stage")[["us", "floor_us", "over_us"]].mean().sort_values("over_us", ascending=False)
    print("stages, mean over the points")
    print_table([{"stage": name, **{key: f"{value:9.1f}" for key, value in row.items()}} for name, row in
                 slow.head(12).iterrows()])  # fmt: skip
    for line in [*verdicts, *found.messages]:
        print(line)
    return 0


def _printed(row: dict[str, object]) -> dict[str, str]:
    """A line of the printed table; what was not timed is left empty."""
    shown = {}
    for name, value in row.items():
        if isinstance(value, float):
            shown[name] = "" if value != value else f"{value:.2f}"
        else:
            shown[name] = str(value)
    return shown
