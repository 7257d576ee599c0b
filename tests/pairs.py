"""The shipped tiny pair, loaded once a test process and dtype, and the golden rounds decoded with it."""

import json
from functools import cache
from pathlib import Path

import kdlab

GOLDEN = Path(__file__).parent / "golden"


@cache
def tiny_pair(dtype="float32"):
    return kdlab.load_pair("tiny", dtype=dtype)


@cache
def golden_rounds():
    return json.loads((GOLDEN / "rounds.json").read_text())


def golden_prompts():
    return [case["prompt"] for case in golden_rounds()]
