"""`kdlab doctor --model DIR`: whether a model fits on the GPUs at hand, and how many ranks it needs."""

import argparse
from dataclasses import asdict
from typing import Any

from kdlab.cli.output import print_json, print_table

ASSUMED_GPU = ("an H200", 139.8)
"""Without a GPU here, what the answer is given for: name and GiB."""
GIB = 1 << 30
_SHOWN = 3


def run_doctor_model(arguments: argparse.Namespace) -> int:
    """Print what `inspect_model` finds; status 1 when the model does not fit on this machine's GPUs."""
    facts = inspect_model(arguments)
    if arguments.json:
        print_json(facts)
    else:
        _print(facts)
    return 0 if facts["fits"] else 1


def inspect_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """Gather the facts from config and index; no weight is read and no GPU memory taken."""
    from kdlab.checks import check_float
    from kdlab.config import DrafterConfig, TargetConfig
    from kdlab.machine import gpu_facts
    from kdlab.model.fit import inspect_index, rank_table, ranks_needed

    target = TargetConfig.load(arguments.model)
    drafter = None if arguments.drafter is None else DrafterConfig.load(arguments.drafter)
    gpu = gpu_facts()
    memory = gpu["gpu_memory_bytes"] or int(ASSUMED_GPU[1] * GIB)
    if arguments.gpu_gib is not None:
        memory = int(check_float("--gpu-gib", arguments.gpu_gib, above=0.0) * GIB)
    sizes = {"context": arguments.context, "streams": arguments.streams}
    table = rank_table(target, drafter, experts=arguments.experts, **sizes)
    index = inspect_index(arguments.model, target)
    needed, count = ranks_needed(table, memory), gpu["gpu_count"] or 0
    fits = needed is not None and needed <= count and not index["problems"]
    return {
        "model": arguments.model,
        "drafter": arguments.drafter,
        "experts": arguments.experts,
        **sizes,
        **index,
        "gpu": gpu["gpu"],
        "gpu_count": count,
        "gpu_bytes": memory,
        "ranks_needed": needed,
        "fits": fits,
        "ranks": [asdict(row) | {"total": row.total, "fits": row.total <= memory} for row in table],
        "verdict": _verdict(index["problems"], needed, count, gpu["gpu"], memory),
    }


def _verdict(problems: list[str], needed: int | None, count: int, gpu: str | None, memory: int) -> str:
    size = f"{memory / GIB:.1f} GiB"
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        return "does not load: " + "; ".join(problems[:_SHOWN]) + more
    if needed is None:
        return f"does not fit in GPUs of {size} with any number of ranks that divides it"
    ranks = "1 rank" if needed == 1 else f"{needed} ranks"
    if gpu is None:
        return f"needs {ranks} of {size}, one GPU each; torch sees no GPU here"
    if needed > count:
        return f"needs {ranks} of {size}, one GPU each; here are {count} ({gpu})"
    return f"fits here: {ranks} of {size}, and here are {count} GPUs ({gpu})"


def _print(facts: dict[str, Any]) -> None:
    stated = "" if facts["tensor_bytes"] is None else f", {facts['tensor_bytes'] / GIB:.2f} GiB"
    count = "no index" if facts["tensors"] is None else f"{facts['tensors']} tensors"
    lines = {
        "model": f"{facts['model']} ({count}{stated})",
        "files": f"{facts['files_here']} of {facts['files']} here, {facts['file_bytes'] / GIB:.2f} GiB",
        "drafter": facts["drafter"] or "-",
        "caches": f"{facts['streams']} x {facts['context']} tokens, bfloat16",
        "experts": facts["experts"],
    }
    for name, value in lines.items():
        print(f"{name:<10} {value}")
    columns = ("weights", "cache", "drafter", "draft_context", "workspace", "total")
    rows = [
        {"ranks": row["ranks"], **{f"{name}_gib": row[name] / GIB for name in columns}, "fits": row["fits"]}
        for row in facts["ranks"]
    ]
    print_table([row | {"fits": "yes" if row["fits"] else "no"} for row in rows])
    print(f"{'verdict':<10} {facts['verdict']}")
