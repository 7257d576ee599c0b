"""`kdlab generate`, `kdlab record` and `kdlab sweep`."""

import argparse
import contextlib
import re
from pathlib import Path
from typing import Any

from kdlab.cli.output import Progress, Reading, print_json, print_table, say
from kdlab.cli.ranks import is_first_rank, run_on_ranks
from kdlab.errors import ArgumentError

_MOST_THREADS = 1024  # far more end the process when they are started


def run_generate(arguments: argparse.Namespace) -> int:
    """Decode prompts and print text and tokens per round."""
    import kdlab
    from kdlab.decode.methods import check_method
    from kdlab.profiling import nvtx_ranges

    _check_width(arguments.method, arguments.width)
    check_method(arguments.method, arguments.budget, arguments.width)
    prompts = _checked_prompts(arguments)
    if (status := run_on_ranks(arguments)) is not None:
        return status
    pair = _pair(arguments)
    if arguments.method == "chain" and arguments.budget > pair.depth_limit > 0:
        say(f"chain of {pair.depth_limit}: the drafter has {pair.depth_limit} slots")
    with nvtx_ranges() if arguments.nvtx else contextlib.nullcontext():
        run = kdlab.generate(
            pair,
            prompts,
            method=arguments.method,
            budget=arguments.budget,
            width=arguments.width,
            progress=_progress("generate", pair),
            **_decode_options(arguments),
        )
    pair.ranks.close()
    if pair.ranks.rank > 0:  # all ranks have the same run, the first one tells of it
        return 0
    if arguments.output:
        kdlab.save_run(run, arguments.output)
    rows = [_prompt_row(run, i) for i in range(len(run.prompts))]
    if arguments.json:
        print_json({"prompts": rows, "provenance": run.provenance})
        return 0
    for row in rows:
        print(f"[{row['id']}] {_summary(row)}")
        print(row["text"])
    return 0


def run_record(arguments: argparse.Namespace) -> int:
    """Record the draft field of prompts into a file."""
    import kdlab
    from kdlab.checks import check_int

    check_int("--top-k", arguments.top_k, minimum=1)
    prompts = _checked_prompts(arguments)
    if (status := run_on_ranks(arguments)) is not None:
        return status
    pair = _pair(arguments)
    field = kdlab.record(
        pair, prompts, top_k=arguments.top_k, progress=_progress("record", pair), **_decode_options(arguments)
    )
    pair.ranks.close()
    if pair.ranks.rank > 0:
        return 0
    kdlab.save_field(field, arguments.output)
    facts = {
        "field": arguments.output,
        "prompts": len(field.prompts),
        "positions": sum(len(prompt.output_ids) for prompt in field.prompts),
        "depth_limit": field.depth_limit,
        "top_k": field.top_k,
        "whole_vocabulary": field.whole_vocabulary,
    }
    if arguments.json:
        print_json(facts | {"provenance": field.provenance})
    else:
        print(f"{facts['field']}: {facts['prompts']} prompts, {facts['positions']} positions, top {facts['top_k']}")
    return 0


def run_sweep(arguments: argparse.Namespace) -> int:
    """Compute tokens per round at every budget from a recorded field."""
    budgets = parse_budgets(arguments.budgets)
    import kdlab

    field = kdlab.load_field(arguments.field)
    if max(budgets) > field.top_k and not (field.whole_vocabulary or arguments.truncated):
        raise ArgumentError("--budgets", f"at most {field.top_k}, the field's top-k, or --truncated", max(budgets))
    table = kdlab.study.sweep(field, budgets, truncated=arguments.truncated)
    if arguments.json:
        print_json({"rows": table.to_dict("records"), "provenance": field.provenance})
        return 0
    shown = ["budget", "num_prompts", "num_rounds", "tokens_per_round", "tokens_per_round_low", "tokens_per_round_high"]
    summary = kdlab.study.summarize(table)
    print_table(summary[shown + (["truncated"] if arguments.truncated else [])].to_dict("records"))
    return 0


def parse_budgets(text: str) -> list[int]:
    """Read `7,15,31` and `0-64`; raises ArgumentError for anything else."""
    budgets: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+))?\s*", part)
        if not found or (found[2] and int(found[2]) < int(found[1])):
            raise ArgumentError("--budgets", "numbers and ranges with commas, as in 0-8,15,31", repr(text))
        budgets += range(int(found[1]), int(found[2] or found[1]) + 1)
    return budgets


def _check_width(method: str, width: int | None) -> None:
    if method == "beam" and width is None:
        raise ArgumentError("--method beam", "a width; give --width N", "none")
    if method != "beam" and width is not None:
        raise ArgumentError("--width", "--method beam", f"--method {method}")


def _checked_prompts(arguments: argparse.Namespace) -> Any:
    """Read the prompts; what else can be told wrong is, before ranks are started and weights are read."""
    from kdlab.checks import check_choice
    from kdlab.decode.settings import check_limits
    from kdlab.model.ranks import EXPERT_MODES

    check_limits(**_decode_options(arguments))
    check_choice("--experts", arguments.experts, EXPERT_MODES)
    return _prompts(arguments)


def _prompts(arguments: argparse.Namespace) -> Any:
    from kdlab.checks import check_int  # here, because it needs torch, which other verbs do without
    from kdlab.model.prompts import PromptSet, load_prompts

    if bool(arguments.prompts) == bool(arguments.prompt):
        got = "both" if arguments.prompt else "none"
        raise ArgumentError("PROMPTS", "either a file of prompts or --prompt TEXT", got)
    if arguments.prompt:
        return arguments.prompt
    prompts = load_prompts(Path(arguments.prompts))
    if arguments.limit is None:
        return prompts
    return PromptSet.of(prompts.id, prompts.prompts[: check_int("--limit", arguments.limit, minimum=1)])


def _pair(arguments: argparse.Namespace) -> Any:
    import torch

    import kdlab
    from kdlab.checks import check_int

    if arguments.threads is not None:
        torch.set_num_threads(check_int("--threads", arguments.threads, minimum=1, maximum=_MOST_THREADS))
    elif arguments.device == "cpu":
        torch.set_num_threads(1)
    return kdlab.load_pair(
        arguments.target,
        arguments.drafter,
        device=arguments.device,
        dtype=arguments.dtype,
        ranks=arguments.ranks,
        experts=arguments.experts,
        progress=Reading() if is_first_rank(arguments) else None,
    )


def _progress(name: str, pair: Any) -> Progress | None:
    return Progress(name) if pair.ranks.rank == 0 else None


def _decode_options(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("max_new_tokens", "temperature", "top_p", "seed", "streams")
    return {name: getattr(arguments, name) for name in names}


def _prompt_row(run: Any, index: int) -> dict[str, Any]:
    return {
        "id": run.prompts[index].id,
        "text": run.text[index],
        "output_ids": run.output_ids[index],
        "finish": run.finish[index],
        "num_rounds": len(run.rounds[index]),
        "tokens_per_round": run.tokens_per_round[index],
    }


def _summary(row: dict[str, Any]) -> str:
    rate = row["tokens_per_round"]
    rounds = f"{row['num_rounds']} rounds of {rate:.2f} tokens" if row["num_rounds"] else "no round"
    return f"{len(row['output_ids'])} tokens in {rounds}, ended by {row['finish']}"
