"""`kdlab traces`: traces that other engines left, checked and converted."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdlab.cli.output import print_json, print_table
from kdlab.cli.usage import add_group, add_verb
from kdlab.errors import ArgumentError, SchemaError

if TYPE_CHECKING:
    from kdlab.study import RoundTrace

_NUMBERS = (
    "method", "setting", "num_prompts", "num_rounds", "tokens_per_round", "tokens_per_round_low",
    "tokens_per_round_high", "rows_per_round", "simulated",
)  # fmt: skip


def add_traces(verbs: Any) -> None:
    """Add `traces` and its verbs to the command line."""
    text = "Check and convert traces: rounds or draft fields that other engines measured."
    examples = """
        kdlab traces check rounds.jsonl
        kdlab traces check field.parquet --json
    """
    actions = add_group(verbs, "traces", text, examples, "actions", "the format: docs/traces.md")
    text = "Print every fault of a trace with its line, or its tokens per round and what it cannot say."
    parser = add_verb(actions, "check", run_traces_check, text, examples)
    parser.add_argument("file", metavar="FILE", help="a .jsonl or .parquet file")
    examples = """
        kdlab traces convert rounds.jsonl rounds.parquet
        kdlab traces convert run.parquet rounds.jsonl
        kdlab traces convert responses.jsonl rounds.parquet --engine sglang --provenance provenance.json
    """
    text = "Write a trace in its other form, or make one of the responses that SGLang or vLLM returned."
    parser = add_verb(actions, "convert", run_traces_convert, text, examples)
    parser.add_argument("source", metavar="IN", help="a trace, or with --engine a .jsonl file, one response a line")
    parser.add_argument("output", metavar="OUT", help="a .jsonl or .parquet file")
    parser.add_argument("--engine", choices=("sglang", "vllm"), help="whose responses IN holds")
    parser.add_argument("--provenance", metavar="FILE", help="with --engine: a JSON object, as docs/traces.md asks for")
    kind = "with --engine: kind of text of responses that do not say it (default: %(default)s)"
    parser.add_argument("--kind", default="text", help=kind)


def run_traces_check(arguments: argparse.Namespace) -> int:
    """Print every fault of a trace with its line, status 2; or what the trace says and cannot say."""
    from kdlab.study import check_trace, load_trace, trace_limits, trace_summary

    faults = check_trace(arguments.file)
    if faults:
        if arguments.json:
            print_json({"file": arguments.file, "faults": faults})
        else:
            for fault in faults:
                print(fault)
            print("1 fault" if len(faults) == 1 else f"{len(faults)} faults")
        return 2
    trace = load_trace(arguments.file)
    summary, limits = trace_summary(trace), trace_limits(trace)
    rows = summary[list(_NUMBERS)].to_dict("records")
    if arguments.json:
        print_json({"file": arguments.file, "faults": [], "rows": rows, "limits": limits})
        return 0
    print_table([{name.replace("tokens_per_round_", ""): value for name, value in row.items()} for row in rows])
    for line in limits:
        print(line)
    return 0


def run_traces_convert(arguments: argparse.Namespace) -> int:
    """Turn a trace into its other form, or an engine's responses into a trace."""
    from kdlab.study import load_trace, save_trace

    if arguments.engine is None:
        if arguments.provenance is not None:
            raise ArgumentError("--provenance", "also --engine; a trace has its own provenance", arguments.provenance)
        trace = load_trace(arguments.source)
    else:
        trace = _imported(arguments)
    save_trace(trace, arguments.output)
    if arguments.json:
        print_json({"output": arguments.output, "trace": repr(trace)})
    else:
        print(f"{arguments.output}: {trace!r}")
    return 0


def _imported(arguments: argparse.Namespace) -> "RoundTrace":
    from kdlab.study import import_responses, read_json_lines

    if arguments.provenance is None:
        raise ArgumentError("--provenance", "a JSON file with what docs/traces.md asks for", "nothing")
    responses = read_json_lines(arguments.source)
    return import_responses(arguments.engine, responses, _json_object(arguments.provenance), kind=arguments.kind)


def _json_object(path: str) -> dict[str, Any]:
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{path}: expected a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise SchemaError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
