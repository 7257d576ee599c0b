"""`kdlab doctor`: what the machine has, whether the shipped data is whole, and one verdict."""

import argparse
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from kdlab.cli.model_fit import run_doctor_model
from kdlab.cli.output import print_json

MINIMUM_PYTHON = (3, 11)
OPTIONAL = {
    "nvidia-ml-py": "driver, clocks and temperature of a GPU in the provenance",
    "cuda-core": "launching CUDA kernels",
    "cuda-bindings": "compiling CUDA kernels",
    "nvidia-cuda-nvrtc": "compiling CUDA kernels (conda: cuda-nvrtc)",
    "nvidia-cuda-runtime": "compiling CUDA kernels: headers (conda: cuda-cudart-dev)",
    "nvtx": "stages of a round as ranges, for `kdlab profile` and `kdlab generate --nvtx`",
    "sgl-flash-mla": "FlashMLA beside the attention kernels, on Hopper",
    "jupyterlab": "opening the notebooks",
    "nbconvert": "`kdlab report`",
    "nh3": "`kdlab report`",
}
"""Packages that kdlab works without, and what each is for."""
_ROW = re.compile(r"\| `(?P<name>[^`]+)` \|.*\| `(?P<sha256>[0-9a-f]{64})` \|")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print what `inspect_machine` finds, or `inspect_model` of a model; status 1 when it cannot run here."""
    if arguments.model is not None:
        return run_doctor_model(arguments)
    facts = inspect_machine()
    if arguments.json:
        print_json(facts)
    else:
        for name, value in facts.items():
            print(f"{name:<18} {_text(value)}")
    return 0 if facts["verdict"].startswith("ready") else 1


def inspect_machine() -> dict[str, Any]:
    """Gather facts about software, GPU, kernels and data; without a GPU no driver is asked for more than that."""
    from kdlab.kernels.jit.facts import kernel_facts
    from kdlab.machine import machine_facts
    from kdlab.paths import DATA
    from kdlab.source import code_facts

    machine = machine_facts()
    names = ("python", "torch", "numpy", "cuda", "driver", "gpu", "gpu_count", "gpu_memory_bytes", "os", "cpu")
    problems = check_data(DATA)
    facts = {
        **{name: code for name, code in code_facts().items() if name != "source_sha256"},
        "interpreter": sys.executable,
        **{name: machine[name] for name in names},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **kernel_facts(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "optional": {name: {"version": installed_version(name), "for": use} for name, use in OPTIONAL.items()},
        "data": problems or f"every file of {DATA.name}/README.md is whole",
    }
    return facts | {"verdict": _verdict(problems, machine["gpu"], facts["kernels"])}


def check_data(folder: Path) -> list[str]:
    """Compare the shipped files with the table in `folder`/README.md; returns one line a file that differs."""
    try:
        rows = list(_ROW.finditer((folder / "README.md").read_text(encoding="utf-8")))
    except OSError:
        return [f"{folder}/README.md cannot be read: kdlab's shipped data is missing"]
    if not rows:
        return [f"{folder}/README.md lists no file"]
    problems = []
    for row in rows:
        try:
            content = (folder / row["name"]).read_bytes()
        except OSError:
            problems.append(f"{row['name']} is missing")
            continue
        if hashlib.sha256(content).hexdigest() != row["sha256"]:
            problems.append(f"{row['name']} has other bytes than the list says")
    return problems


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _verdict(problems: list[str], gpu: str | None, kernels: str) -> str:
    if sys.version_info < MINIMUM_PYTHON:
        return f"not ready: needs Python 3.11 or newer, got {platform.python_version()}"
    if problems:
        return "not ready: " + "; ".join(problems)
    if gpu is None:
        return "ready on the CPU (torch finds no GPU)"
    return f"ready on {gpu} and on the CPU; kernels: {kernels}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return f"\n{'':<18} ".join(f"{name} {_text(use['version'])}: {use['for']}" for name, use in value.items())
    if isinstance(value, list):
        return "; ".join(value)
    return "-" if value is None else str(value)
