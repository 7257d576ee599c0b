"""`kdlab bench round`: a round of Kimi K2.6 at its true shapes; `bench collectives`: what its ranks exchange."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdlab.cli.output import Progress, print_json, print_table, say
from kdlab.cli.ranks import add_gpu_option, is_started_rank, join_gpus, require_gpus, run_on_ranks
from kdlab.cli.usage import add_verb, new_file

if TYPE_CHECKING:
    import pandas as pd

    from kdlab.model.ranks import Ranks


def add_bench_round(benchmarks: Any) -> None:
    """Add `round` and `collectives` to the benchmarks."""
    examples = """
        kdlab bench round
        kdlab bench round --experts ep
        kdlab bench round --ranks 1 --layers 4
        kdlab bench round --seconds 400 --out data/recorded/rounds-h200.parquet
        kdlab bench round --gpus 4 --out data/recorded/rounds-4gpu.parquet
        kdlab bench round --read data/recorded/rounds-4gpu.parquet
    """
    text = "Time rounds of Kimi K2.6 at its true shapes, random weights: one rank's slice on this GPU, or real ranks."
    parser = add_verb(benchmarks, "round", run_bench_round, text, examples)
    parser.add_argument("--model", default="k2.6", choices=("k2.6",), help="whose shapes (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="whose slice (default: %(default)s)")
    add_gpu_option(parser)
    experts = "how they are split (default: tp and, for some points, ep; tp on several GPUs)"
    parser.add_argument("--experts", choices=("tp", "ep"), help=experts)
    parser.add_argument("--layers", type=int, metavar="N", help="of the target (default: all 61)")
    parser.add_argument("--seconds", type=float, default=300.0, help="no point begins later (default: %(default)s)")
    parser.add_argument("--read", nargs="+", metavar="FILE", help="time nothing: print the tables of recorded rows")
    times = "recorded by `kdlab bench collectives`, for rounds of several GPUs (default: the shipped ones, if any)"
    parser.add_argument("--collectives", metavar="FILE", help=times)
    saved = "save the result rows as Parquet; till the end those so far are kept beside it, as NAME.part.parquet"
    parser.add_argument("-o", "--out", type=new_file, metavar="FILE", help=saved)
    examples = """
        kdlab bench collectives --gpus 2
        kdlab bench collectives --gpus 4 --out data/recorded/all-reduce-h200.parquet
    """
    text = "Time the all-reduces and gatherings of Kimi K2.6's rounds over 2, 4, ... N GPUs, in captured chains."
    parser = add_verb(benchmarks, "collectives", run_bench_collectives, text, examples)
    add_gpu_option(parser)
    parser.set_defaults(gpus=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="for all of it (default: %(default)s)")
    parser.add_argument("-o", "--out", type=new_file, metavar="FILE", help="save the result rows as Parquet")


def run_bench_round(arguments: argparse.Namespace) -> int:
    """Time rounds; print a line a point, the slowest stages against floors, the goals, and ranks against a slice."""
    from kdlab.bench import write_rows

    if arguments.collectives and not is_started_rank():  # not found to be wrong behind all the rounds
        _read("--collectives", [arguments.collectives], "all_reduce", "collectives")
    if arguments.read:
        return _tell(arguments, _read("--read", arguments.read, "round", "round"), ())
    _check(arguments)
    if arguments.gpus > 1:
        require_gpus(arguments.gpus, "bench round")
    if (status := run_on_ranks(arguments, "gpus")) is not None:
        return status
    from kdlab.bench.full_width.suite import bench_round

    out = Path(arguments.out) if arguments.out else None
    so_far = out and out.with_name(f"{out.stem}.part{out.suffix}")  # an older whole file stays till this run has ended
    running = None if arguments.gpus == 1 else join_gpus(arguments.gpus, arguments.experts or "tp")
    is_first = running is None or running.rank == 0
    found = bench_round(
        ranks=arguments.ranks,
        experts=arguments.experts,
        running=running,
        layers=arguments.layers,
        seconds=arguments.seconds,
        progress=_progress(running, "bench round", "points"),
        keep=partial(write_rows, path=so_far) if so_far and is_first else None,
    )
    if _leave(running) > 0:  # all ranks have the same rows, the first one tells of them
        return 0
    if found.rows.empty:
        for line in found.messages:
            say(line)
        return 1
    if out and so_far:
        write_rows(found.rows, out)
        so_far.unlink(missing_ok=True)
    return _tell(arguments, found.rows, found.messages)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what the benchmark would, before GPUs are looked for and ranks started."""
    from kdlab.bench.full_width.random_pair import check_k26
    from kdlab.checks import check_float, check_int

    check_float("--seconds", arguments.seconds, above=0.0)
    running = check_int("--gpus", arguments.gpus, minimum=1)
    check_k26(arguments.ranks, arguments.experts, arguments.layers, running=running)


def _read(option: str, files: list[str], op: str, benchmark: str) -> "pd.DataFrame":
    """Read the rows of a benchmark, which are known by one of their ops."""
    from kdlab.bench import read_rows
    from kdlab.errors import ArgumentError

    rows = read_rows(*files)
    if op not in set(rows["op"]):
        found = ", ".join(sorted(set(rows["op"]))) or "nothing"
        raise ArgumentError(option, f"rows of `kdlab bench {benchmark}`", f"rows of {found}")
    return rows


def run_bench_collectives(arguments: argparse.Namespace) -> int:
    """Time collectives over 2, 4, ... and all of several GPUs; print a line a case."""
    from kdlab.checks import check_float, check_int

    check_int("--gpus", arguments.gpus, minimum=2)
    check_float("--seconds", arguments.seconds, above=0.0)
    require_gpus(arguments.gpus, "bench collectives")
    if (status := run_on_ranks(arguments, "gpus")) is not None:
        return status
    import pandas as pd

    from kdlab.bench import write_rows
    from kdlab.bench.collectives import bench_collectives, collective_table

    running, found = join_gpus(arguments.gpus), []
    sizes = [size for size in range(2, arguments.gpus + 1) if size & (size - 1) == 0 or size == arguments.gpus]
    for size in sizes:
        first = running.first(size)
        if first is not None:
            progress = _progress(running, f"bench collectives of {size} ranks", "cases")
            found.append(bench_collectives(first, seconds=arguments.seconds / len(sizes), progress=progress))
    if _leave(running) > 0:
        return 0
    rows = pd.concat(found, ignore_index=True)
    if arguments.out:
        write_rows(rows, arguments.out)
    table = collective_table(rows).to_dict("records")
    if arguments.json:
        print_json({"rows": table})
    else:
        print_table([_printed(row) for row in table])
    return 0


def _leave(running: "Ranks | None") -> int:
    """Take leave of the other ranks; returns which rank this one was."""
    if running is None:
        return 0
    running.close()
    return running.rank


def _progress(running: "Ranks | None", name: str, things: str) -> Progress | None:
    return Progress(name, things) if running is None or running.rank == 0 else None


def _tell(arguments: argparse.Namespace, rows: "pd.DataFrame", messages: tuple[str, ...]) -> int:
    from kdlab.bench.full_width.table import jumps, part_table, point_table, stage_table, verdict_lines

    points, stages, parts = point_table(rows), stage_table(rows), part_table(rows)
    jumped = jumps(points)
    ranks, verdicts = _rank_table(arguments, points, rows)
    verdicts = [*verdict_lines(points), *verdicts]
    if arguments.json:
        documents = {"points": points, "stages": stages, "parts": parts, "jumps": jumped, "ranks": ranks}
        plain = {name: table.astype(object).where(table.notna(), None).to_dict("records")
                 for name, table in documents.items() if table is not None}  # fmt: skip
        print_json(plain | {"verdicts": verdicts, "messages": messages})
        return 0
    print_table([_printed(row) for row in points.to_dict("records")])
    if not stages.empty:
        print("\nstages, mean over the points")
        print_table(_mean_lines(stages, ["stage"])[:12])
    if not parts.empty:
        print("\nparts of stages by themselves, in their stages' times already")
        print_table(_mean_lines(parts, ["part", "stage"]))
    if not jumped.empty:
        print("\njumps between neighbouring row counts, in ratios of times and of floors")
        print_table([_printed(row) for row in jumped.to_dict("records")])
    if ranks is not None:
        print("\nrounds over several GPUs, and the slice of one rank with the collectives added")
        print_table([_printed(row) | {"difference": f"{row['difference']:+.1%}"} for row in ranks.to_dict("records")])
    for line in [*verdicts, *messages, *_sources(rows)]:
        print(line)
    return 0


def _mean_lines(table: "pd.DataFrame", names: list[str]) -> list[dict[str, str]]:
    """Return printed lines of means by `names`, what loses most first."""
    means = table.groupby(names)[["us", "floor_us", "over_us"]].mean().sort_values("over_us", ascending=False)
    lines = means.reset_index().to_dict("records")
    return [{key: value if key in names else f"{value:9.1f}" for key, value in line.items()} for line in lines]


def _sources(rows: "pd.DataFrame") -> list[str]:
    """Say on what rows were measured, a line a run that knows it."""
    known = rows.drop_duplicates("run_id").dropna(subset=["gpu", "started_utc", "commit"])
    return [f"measured on {run.gpu}, {run.started_utc[:10]}, commit {run.commit[:7]}" for run in known.itertuples()]


def _rank_table(
    arguments: argparse.Namespace, points: "pd.DataFrame", rows: "pd.DataFrame"
) -> "tuple[pd.DataFrame | None, list[str]]":
    """Return the comparison of real ranks with a slice, and what is to be said of it."""
    from kdlab.bench import read_rows
    from kdlab.bench.collectives import RECORDED
    from kdlab.bench.full_width.rank_table import rank_table, rank_verdict
    from kdlab.errors import ArgumentError

    if (points["gpus"] == 1).all():
        return None, []
    recorded = Path(arguments.collectives) if arguments.collectives else RECORDED
    if not arguments.collectives and not recorded.exists():
        return None, [f"slice + collectives: not compared, there is no {recorded.name}; see --collectives"]
    try:
        table = rank_table(rows, read_rows(recorded))
    except ArgumentError as error:  # collectives of fewer ranks, or of other sizes
        return None, [f"slice + collectives: not compared, {error}; see --collectives"]
    if table.empty:
        return None, ["slice + collectives: not compared, no round of several GPUs has its slice timed"]
    return table, [rank_verdict(table)]


def _printed(row: dict[str, object]) -> dict[str, str]:
    """A line of the printed table; what was not timed is left empty."""
    shown = {}
    for name, value in row.items():
        if name == "met" and value in (0.0, 1.0):
            shown[name] = "yes" if value else "no"
        elif isinstance(value, float):
            shown[name] = "" if value != value else f"{value:.2f}"
        else:
            shown[name] = str(value)
    return shown
