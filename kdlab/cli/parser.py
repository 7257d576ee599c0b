"""The words of the command line: verbs, options, their help and examples."""

import argparse
from typing import Any

from kdlab.cli import bench_round, bench_verbs, doctor, grid_verb, model_verbs, notebook_verbs, report_verb
from kdlab.cli.profile_verb import add_profile
from kdlab.cli.ranks import add_rank_options
from kdlab.cli.trace_verbs import add_traces
from kdlab.cli.usage import add_group, add_verb, names, new_file, numbers
from kdlab.source import VERSION

STATUSES = """exit status:
  0    done
  1    the work failed, or its output could not be written
  2    wrong usage, a bad value, a device that is not there or too small for the models, or a file that is missing or
       is not what it should be
  3    a notebook did not finish; what ran of it is in its .partial.ipynb
  130  interrupted
"""
PROMPT_FILE = """prompt files: one JSON object a line, with "id" and "kind" (any text; "kind" groups prompts in
tables), and either "text" or "token_ids":
  {"id": "cats-1", "kind": "prose", "text": "the cat sees the "}
  {"id": "ids-1", "kind": "sums", "token_ids": [21, 11, 4]}
"""
PLACES = """Without -o the run goes to runs/ of the clone that this kdlab is from, whatever the working directory,
and what the notebook writes itself goes where its parameters `figures` and `results` say. With -o into another folder
these two, where the notebook has them and -p does not set them, become FOLDER/figures and FOLDER, so that nothing in
the clone is overwritten. A run that fails leaves an earlier finished one as it is, and what it got to in
FILE's .partial.ipynb.
"""
REPORTED = """Of a named run everything must have finished, or nothing is written and the status is 3. The PDF is what a
Chromium that is found on this machine (chromium, google-chrome) prints of the HTML.
"""
DEFAULT_BUDGETS = "0,1,3,7,15,31,63"
_PAIRS = "a shipped pair: bundled (kimi-k26-mini), bundled-b16 or tiny"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; `parse_args(...).verb` is the function of the verb, called with the arguments."""
    parser = argparse.ArgumentParser(
        prog="kdlab",
        description="A workbench for DDTree speculative decoding of Kimi K2.6.",
        epilog=f"`kdlab VERB --help` shows examples.\n\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kdlab {VERSION}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    _add_doctor(verbs)
    _add_generate(verbs)
    _add_record(verbs)
    _add_sweep(verbs)
    add_traces(verbs)
    _add_bench(verbs)
    add_profile(verbs)
    _add_run(verbs)
    _add_grid(verbs)
    _add_report(verbs)
    return parser


def _add_doctor(verbs: Any) -> None:
    text = "Say what this machine has, whether the shipped data is whole, and whether kdlab can run."
    examples = """
        kdlab doctor
        kdlab doctor --json
        kdlab doctor --model Kimi-K2.6 --drafter Kimi-K2.6-DFlash --context 131072
    """
    parser = add_verb(verbs, "doctor", doctor.run_doctor, text, examples)
    model = "say instead whether this checkpoint fits on the GPUs here, and how many ranks it needs; reads no weights"
    parser.add_argument("--model", metavar="DIR", help=model)
    parser.add_argument("--drafter", metavar="DIR", help="with --model: a DFlash checkpoint directory")
    tokens = "tokens of each stream in the caches (default: %(default)s)"
    parser.add_argument("--context", type=int, default=32768, metavar="N", help=tokens)
    parser.add_argument("--streams", type=int, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--experts", default="tp", choices=("tp", "ep"), help="(default: %(default)s)")
    parser.add_argument("--gpu-gib", type=float, metavar="GIB", help="as if the GPUs had so much memory")


def _add_generate(verbs: Any) -> None:
    examples = """
        kdlab generate data/prompts/code.jsonl --limit 2
        kdlab generate --prompt "def read_lines(path):" --target bundled-b16 --max-new-tokens 32
        kdlab generate data/prompts/prose.jsonl --budget 15 --temperature 0.6 --seed 7 --json
        kdlab generate data/prompts/math.jsonl --method chain --budget 7 -o run.parquet
        kdlab generate --prompt "Why?" --target DIR --drafter DIR --device cuda --dtype bfloat16 --ranks 8
    """
    text = "Decode prompts and print the text with its tokens per round."
    parser = add_verb(verbs, "generate", model_verbs.run_generate, text, examples, PROMPT_FILE)
    _add_model_options(parser)
    parser.add_argument("--method", default="ddtree", help="ar, chain, ddtree or beam (default: %(default)s)")
    budget = "tree nodes without the root; for chain its length, at most the drafter's slots; for beam the most nodes"
    parser.add_argument("--budget", type=int, default=32, help=f"{budget} (default: %(default)s)")
    parser.add_argument("--width", type=int, metavar="N", help="nodes a depth; needed by --method beam, and only there")
    parser.add_argument("-o", "--output", type=new_file, metavar="FILE", help="save every round as Parquet")
    ranges = "push an NVTX range for every stage: `nsys profile kdlab generate ... --nvtx`"
    parser.add_argument("--nvtx", action="store_true", help=ranges)


def _add_record(verbs: Any) -> None:
    examples = """
        kdlab record data/prompts/code.jsonl -o field.parquet
        kdlab record data/prompts/code.jsonl -o field.parquet --top-k 128 --max-new-tokens 200
    """
    text = "Decode prompts once and keep the draft at every position: the draft field, from which `sweep` works."
    parser = add_verb(verbs, "record", model_verbs.run_record, text, examples, PROMPT_FILE)
    _add_model_options(parser)
    parser.add_argument("--top-k", type=int, default=64, help="draft candidates kept a slot (default: %(default)s)")
    parser.add_argument("-o", "--output", type=new_file, metavar="FILE", required=True, help="the file to write")


def _add_sweep(verbs: Any) -> None:
    examples = """
        kdlab sweep field.parquet
        kdlab sweep field.parquet --budgets 0-64
        kdlab sweep field.parquet --budgets 7,15,31,100 --truncated --json
    """
    text = "Tokens per round at every budget, from a recorded draft field; no model is run."
    parser = add_verb(verbs, "sweep", model_verbs.run_sweep, text, examples)
    parser.add_argument("field", metavar="FIELD", help="a file that `kdlab record` wrote")
    parser.add_argument(
        "--budgets", default=DEFAULT_BUDGETS, help="numbers and ranges, with commas (default: %(default)s)"
    )
    parser.add_argument("--truncated", action="store_true", help="admit budgets above the field's top-k and mark them")


def _add_bench(verbs: Any) -> None:
    examples = """
        kdlab bench kernels
        kdlab bench kernels --json
    """
    benchmarks = add_group(verbs, "bench", "Measure this machine's GPU.", examples, "benchmarks")
    examples = """
        kdlab bench kernels
        kdlab bench kernels --ops verify_attention,moe_int4 --heads 8
        kdlab bench kernels --seconds 300 --out data/recorded/kernels-h200.parquet
    """
    text = "Time the CUDA ops beside their peers at Kimi K2.6's sizes; needs a GPU."
    parser = add_verb(benchmarks, "kernels", bench_verbs.run_bench_kernels, text, examples)
    long = "for all of it; from 120 every case is timed, below it the few that stand for them (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=25.0, help=long)
    parser.add_argument("--ops", type=names, metavar="OP,...", help="(default: all)")
    parser.add_argument("--heads", type=numbers, metavar="H,...", help="64, or 8 as on one rank of 8 (default: both)")
    parser.add_argument("-o", "--out", type=new_file, metavar="FILE", help="save the result rows as Parquet")
    bench_round.add_bench_round(benchmarks)
    _add_bench_rounds(benchmarks)
    examples = """
        kdlab bench counters
        kdlab bench counters --out data/recorded/counters-h200.parquet
    """
    text = "Count the bytes that each attention kernel reads, under Nsight Compute (`ncu`); needs a GPU."
    parser = add_verb(benchmarks, "counters", bench_verbs.run_bench_counters, text, examples)
    parser.add_argument("-o", "--out", type=new_file, metavar="FILE", help="save the result rows as Parquet")
    examples = """
        kdlab bench compare first.parquet second.parquet
    """
    text = "Compare the kernel times of two runs; status 1 when one differs by more than the tolerance."
    parser = add_verb(benchmarks, "compare", bench_verbs.run_bench_compare, text, examples)
    parser.add_argument("first", metavar="FIRST")
    parser.add_argument("second", metavar="SECOND")
    parser.add_argument("--tolerance", type=float, default=0.05, help="as a share (default: %(default)s)")


def _add_bench_rounds(benchmarks: Any) -> None:
    examples = """
        kdlab bench rounds
        kdlab bench rounds --target bundled-b16 --repeats 3
        kdlab bench rounds --repeats 5 --out data/recorded/rounds-mini-h200.parquet
    """
    text = "Time live rounds of a small pair: AR, chains, trees, and trees with the host's part in them; needs a GPU."
    parser = add_verb(benchmarks, "rounds", bench_verbs.run_bench_rounds, text, examples)
    parser.add_argument("--target", default="bundled", help="a shipped pair (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=10, metavar="N", help="of each kind (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("-o", "--out", type=new_file, metavar="FILE", help="save the result rows as Parquet")


def _add_run(verbs: Any) -> None:
    examples = """
        kdlab run notebooks/10_budget_sweep.ipynb
        kdlab run notebooks/10_budget_sweep.ipynb --list
        kdlab run notebooks/10_budget_sweep.ipynb -p full=true -p device=cuda -o runs/full/10_budget_sweep.ipynb
        kdlab run notebooks/00_start_here.ipynb --cell-timeout 60 --again
    """
    text = "Execute one notebook with parameters. A finished run with the same inputs is not run again."
    parser = add_verb(verbs, "run", notebook_verbs.run_run, text, examples, PLACES)
    parser.add_argument("notebook", metavar="NOTEBOOK")
    parser.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    output = "the executed notebook (default: the clone's runs/<its name>)"
    parser.add_argument("-o", "--output", metavar="FILE", help=output)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="limit of the whole run")
    parser.add_argument("--cell-timeout", type=float, metavar="SECONDS", help="limit of each cell")
    parser.add_argument("--again", action="store_true", help="run also when a finished run is there")
    parser.add_argument("--list", action="store_true", help="print the parameters and their defaults, run nothing")


def _add_grid(verbs: Any) -> None:
    text = "Execute one notebook at many parameter points, side by side, and collect their results in one table."
    grid_verb.add_grid(add_verb(verbs, "grid", grid_verb.run_grid_verb, text, grid_verb.EXAMPLES, grid_verb.NOTES))


def _add_report(verbs: Any) -> None:
    examples = """
        kdlab report runs/00_start_here.ipynb runs/10_budget_sweep.ipynb
        kdlab report runs/10_budget_sweep.ipynb -o sweep.html --title "Budget sweep" --figures figures
        kdlab report night1
        kdlab report --compare night1 night2 --about drafter_sha256
    """
    text = "Write one self-contained HTML file from executed notebooks, and print their tables and conclusions."
    parser = add_verb(verbs, "report", report_verb.run_report, text, examples, REPORTED)
    what = "executed notebooks, in the report's order, or one run or grid: the name of its folder in runs/, or a path"
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK|NAME", help=what)
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="compare two named runs, prompt by prompt")
    about = "with --compare: fields that may differ, as the comparison is about them (default: none)"
    parser.add_argument("--about", type=names, default=[], metavar="FIELD,...", help=about)
    output = "(default: reports/kdlab.html; of a named run reports/NAME/report.html)"
    parser.add_argument("-o", "--output", metavar="FILE", help=output)
    parser.add_argument("--title", help="(default: kdlab report, or the run's name)")
    figures = "write every figure as PNG, SVG and PDF into this folder (default of a named run: figures/ beside FILE)"
    parser.add_argument("--figures", metavar="FOLDER", help=figures)
    pdf = "print the report to PDF too, beside FILE (default: of named runs, where a Chromium is found)"
    parser.add_argument("--pdf", action=argparse.BooleanOptionalAction, help=pdf)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="?", metavar="PROMPTS", help="a .jsonl file of prompts")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of the file")
    parser.add_argument("--target", default="bundled", help=f"a checkpoint directory, or {_PAIRS}")
    parser.add_argument("--drafter", metavar="DIR", help="a DFlash checkpoint directory (default: the pair's own)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float64 (default: %(default)s)")
    add_rank_options(parser)
    parser.add_argument("--max-new-tokens", type=int, default=96, help="cap on each output (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--streams", type=int, help="prompts decoded together (default: up to 8)")
    threads = "CPU threads of torch (default: 1 with --device cpu: the shipped pairs' steps are too small to share)"
    parser.add_argument("--threads", type=int, metavar="N", help=threads)
