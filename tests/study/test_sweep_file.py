"""Sweeps as a file give back what the sweeps said; trees cut by path probability hold what a plain walk finds."""

import math

import numpy as np
import pandas as pd
import pytest

from kdlab.errors import ArgumentError, SchemaError
from kdlab.study import summarize
from kdlab.study.controls import sweep_adaptive_trees
from kdlab.study.sweep_file import load_sweeps, save_sweeps, sweep_arms
from kdlab.study.walk import walk_rounds
from tests.study.fields import draft_field

FIELD = draft_field(1, 3, kinds=("text", "code"))


def test_a_file_gives_the_sweeps_back(tmp_path):
    table = sweep_arms(FIELD, (1, 3))
    assert set(table["method"]) == {"ddtree", "adaptive_tree", "chain", "adaptive_chain", "ar"}
    save_sweeps(table, tmp_path / "s.parquet")
    found = load_sweeps(tmp_path / "s.parquet")
    assert set(table.columns) == set(found.columns)
    names = ["method", "setting", "prompt", "kind", "round_lengths", "round_rows", "tokens_per_round", "rows_per_round",
             "target_sha256", "temperature", "loop"]  # fmt: skip
    assert found[names].to_dict("records") == table[names].to_dict("records")
    pd.testing.assert_frame_equal(summarize(found)[["method", "tokens_per_round"]],
                                  summarize(table)[["method", "tokens_per_round"]])  # fmt: skip


def test_wrong_tables_and_files_are_named(tmp_path):
    with pytest.raises(ArgumentError, match="loop"):
        save_sweeps(sweep_arms(FIELD, (1,)).drop(columns="loop"), tmp_path / "s.parquet")
    (tmp_path / "s.parquet").write_bytes(b"none")
    with pytest.raises(SchemaError):
        load_sweeps(tmp_path / "s.parquet")


def paths_of(prompt, position, cut):
    """Every path of candidates whose probability is at least `cut`, by walking all of them."""
    found, waiting = [], [((), 0.0)]
    while waiting:
        path, logp = waiting.pop()
        if path:
            found.append((path, logp))
        if len(path) < prompt.log_probs.shape[1]:
            depth = len(path)
            candidates = zip(prompt.token_ids[position, depth], prompt.log_probs[position, depth], strict=True)
            for token, more in candidates:
                if np.float32(logp + float(more)) >= math.log(cut):
                    waiting.append(((*path, int(token)), logp + float(more)))
    return found


@pytest.mark.parametrize("cut", [0.02, 0.1, 0.4])
def test_an_adaptive_tree_holds_the_likely_paths_and_no_others(cut):
    table = sweep_adaptive_trees(FIELD, 300, [cut]).set_index("prompt")
    for prompt in FIELD.prompts:
        accepted, verified = [], []
        for position in range(len(prompt.output_ids)):
            paths = {path for path, _ in paths_of(prompt, position, cut)}
            following = tuple(prompt.next_ids[position].tolist())
            accepted.append(sum(following[:depth] in paths for depth in range(1, len(following) + 1)))
            verified.append(len(paths) + 1)
        starts = walk_rounds(np.array(accepted), prompt.num_starts)
        assert table.loc[prompt.prompt, "round_lengths"] == (np.array(accepted)[starts] + 1).tolist()
        assert table.loc[prompt.prompt, "round_rows"] == np.array(verified)[starts].tolist()


def test_an_adaptive_tree_keeps_within_its_budget():
    table = sweep_adaptive_trees(FIELD, 4, [0.001])
    assert max(rows for listed in table["round_rows"] for rows in listed) == 5


@pytest.mark.parametrize(("call", "name"), [
    (lambda: sweep_adaptive_trees(FIELD, 0), "budget"),
    (lambda: sweep_adaptive_trees(draft_field(1, 1, top_k=3), 4), "budget"),
    (lambda: sweep_adaptive_trees(FIELD, 4, [0.0]), "thresholds"),
    (lambda: sweep_adaptive_trees(FIELD, 4, [0.1, 0.1]), "thresholds"),
])  # fmt: skip
def test_wrong_arguments_are_named(call, name):
    with pytest.raises(ArgumentError, match=name):
        call()
