"""Runs, rounds and fields say in one line what they hold, so that a notebook cell may end with one."""

import re
from itertools import chain

import numpy as np

import kdlab
from kdlab.decode.records import Run
from tests.pairs import tiny_pair


def test_every_result_prints_as_one_short_line():
    pair = tiny_pair()
    run = kdlab.generate(pair, ["the dog ", "5+40="], budget=4, max_new_tokens=12)
    field = kdlab.record(pair, ["the dog ", "5+40="], top_k=8, max_new_tokens=12)
    for value in (run, run.rounds[0][0], field, field.prompts[0]):
        assert len(repr(value)) < 160
        assert "\n" not in repr(value)
    lengths = list(chain.from_iterable(run.round_lengths))
    counts = f"num_tokens={sum(map(len, run.output_ids))}, num_rounds={len(lengths)}"
    expected = f"Run(method='ddtree', budget=4, num_prompts=2, {counts}, tokens_per_round={np.mean(lengths):.3f})"
    assert repr(run) == expected
    first = run.rounds[0][0]
    assert repr(first).endswith(f"num_nodes=5, num_tokens={first.num_tokens})")
    assert re.fullmatch(r"DraftField\(num_prompts=2, num_positions=\d+, depth_limit=7, top_k=8, .*\)", repr(field))
    assert "prompt_id='1'" in repr(field.prompts[1])


def test_an_empty_run_prints_too():
    assert "num_rounds=0, tokens_per_round=nan" in repr(Run([], [], [], [], [], []))
