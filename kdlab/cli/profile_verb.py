"""`kdlab profile`: where the time of rounds and kernels goes, launch by launch."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kdlab.cli.output import print_json, print_table, say
from kdlab.cli.usage import add_group, add_verb, names, new_file, numbers

if TYPE_CHECKING:
    import pandas as pd

ROUND_EXAMPLES = """
    kdlab profile round
    kdlab profile round --model bundled --streams 8 --per-layer
    kdlab profile round --model k2.6 --rows 9 --context 8192 --only timeline
    kdlab profile round --out data/recorded/nsight-h200.parquet
"""
KERNELS_EXAMPLES = """
    kdlab profile kernels
    kdlab profile kernels --ops verify_attention,moe_int4 --heads 8
    kdlab profile kernels --out data/recorded/nsight-h200.parquet
"""
NOTES = """Counters come from Nsight Compute (`ncu`), which runs each launch alone with cold caches; the
timeline comes from torch.profiler, which watches eager and captured rounds run. FILE keeps what it has of the other
subject (round or kernels) from the same GPU.
"""


def add_profile(verbs: Any) -> None:
    """Add `kdlab profile round` and `kdlab profile kernels` to the parsers of `verbs`."""
    examples = """
        kdlab profile round
        kdlab profile kernels
    """
    subjects = add_group(verbs, "profile", "Profile rounds and kernels, launch by launch.", examples, "subjects")
    text = "Where does a round's time go: stages, launch gaps, memory and matrix units."
    _add_round(add_verb(subjects, "round", run_profile_round, text, ROUND_EXAMPLES, NOTES))
    text = "Count what the CUDA ops of `bench kernels` do with memory and matrix units; needs a GPU."
    _add_kernels(add_verb(subjects, "kernels", run_profile_kernels, text, KERNELS_EXAMPLES, NOTES))


def _add_round(parser: argparse.ArgumentParser) -> None:
    model = "k2.6 (one rank's slice at its true shapes, random weights), shipped pairs, checkpoints"
    parser.add_argument("--model", type=names, default="k2.6,bundled", metavar="NAME,...",
                        help=f"{model} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rows", type=int, default=33, metavar="N", help="verified a stream (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=1, metavar="N", help="(default: %(default)s)")
    context = "committed rows of k2.6; a pair's are the shipped prompts (default: %(default)s)"
    parser.add_argument("--context", type=int, default=1024, metavar="N", help=context)
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="of k2.6: whose slice (default: %(default)s)")
    parser.add_argument("--experts", default="tp", choices=("tp", "ep"), help="of k2.6 (default: %(default)s)")
    layers = "of k2.6 (default: 4 under ncu; the timeline has these and all 61)"
    parser.add_argument("--layers", type=int, metavar="N", help=layers)
    parser.add_argument("--per-layer", action="store_true", help="note the target's layer of each launch")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of the timeline (default: %(default)s)")
    _add_shared(parser, "both", 90.0)


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", type=names, metavar="OP,...", help="(default: all)")
    parser.add_argument("--heads", type=numbers, metavar="H,...", help="64, or 8 as on one rank of 8 (default: both)")
    _add_shared(parser, "counters, and the timeline where there are none", 60.0)


def _add_shared(parser: argparse.ArgumentParser, sources: str, seconds: float) -> None:
    parser.add_argument("--only", choices=("timeline", "counters"), help=f"(default: {sources})")
    limit = "for all of it; what is under way then ends within half a minute (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=seconds, help=limit)
    parser.add_argument("-o", "--out", type=new_file, metavar="FILE", help="save the launches as Parquet")


def run_profile_round(arguments: argparse.Namespace) -> int:
    """Profile rounds of models; print a line a stage."""
    from kdlab.profiling import profile_rounds

    sizes = {name: getattr(arguments, name) for name in ("rows", "streams", "context", "ranks", "experts")}
    options = {"layers": arguments.layers, "per_layer": arguments.per_layer, "repeats": arguments.repeats}
    return _run(arguments, "round", partial(profile_rounds, arguments.model, **options, **sizes))


def run_profile_kernels(arguments: argparse.Namespace) -> int:
    """Profile the ops of the kernel benchmark; print a line a case."""
    from kdlab.profiling import profile_kernels

    chosen = {name: value for name in ("ops", "heads") if (value := getattr(arguments, name)) is not None}
    return _run(arguments, "kernels", partial(profile_kernels, **chosen))


def _run(arguments: argparse.Namespace, subject: str, profile: "Callable[..., pd.DataFrame]") -> int:
    import pandas as pd

    from kdlab.profiling import rows_beside, summary_lines, summary_table, write_launches

    kept = rows_beside(arguments.out, subject) if arguments.out else None
    found = profile(only=arguments.only, seconds=arguments.seconds, tell=_once())
    if found.empty:
        say("nothing could be profiled")
        return 1
    if arguments.out:
        write_launches(found if kept is None else pd.concat([kept, found], ignore_index=True), arguments.out)
    table, lines = summary_table(found), summary_lines(found)
    if arguments.json:
        print_json({"rows": table.astype(object).where(table.notna(), None).to_dict("records"), "rounds": lines})
        return 0
    for line in lines:
        print(line)
    for case, group in table.groupby("case", sort=False):
        print(f"\n{case}")
        print_table([_printed(row) for row in group.drop(columns="case").to_dict("records")])
    return 0


def _once() -> "Callable[[str], None]":
    """Say each sentence once: several models may lack the same thing."""
    said: set[str] = set()

    def tell(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return tell


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    forms = {"launches": ".0f", "us": ".1f", "share": ".1%", "alone_us": ".1f", "GB_s": ".0f", "tensor_pct": ".1f"}
    return {name: "" if value != value else format(value, forms.get(name, "")) for name, value in row.items()}
