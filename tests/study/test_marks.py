"""Figures of others find their place by their own arm, and only where the line has that arm."""

import numpy as np
import pandas as pd
import pytest

from kdlab.study.marks import published_marks, published_pairs, trace_mark
from kdlab.study.published import published_acceptance
from kdlab.study.sweep_file import sweep_arms
from kdlab.study.traces.rounds import round_trace
from kdlab.study.workloads import Line, Profile
from tests.study.fields import draft_field
from tests.study.traces import PROVENANCE

EASY, HARD = (draft_field(seed, 6, follow=follow) for seed, follow in ((3, 0.9), (4, 0.2)))
LINE = Line.of({"easy": Profile.of(sweep_arms(EASY, (3,)), "easy"), "hard": Profile.of(sweep_arms(HARD, (3,)), "hard")})
LOW, HIGH = LINE.places()


def test_chains_are_placed_and_trees_are_not():
    middle = (LOW + HIGH) / 2
    rows = [("chain", 3, middle), ("chain", 2, LINE.at(middle).tokens_per_round("chain", 2)), ("tree", 3, middle),
            ("chain", 9, middle), ("chain", 3, HIGH + 0.5)]  # fmt: skip
    marked = published_marks(pd.DataFrame(rows, columns=["method", "drafted", "tokens_per_round"]), LINE)["place"]
    assert marked[:2].tolist() == pytest.approx([middle, middle])
    assert np.isnan(marked[2:]).all()


def test_published_trees_lost_to_chains_of_as_many_tokens():
    pairs = published_pairs(published_acceptance())
    assert len(pairs) == 4
    assert (pairs["gain"] < 0).all()
    assert published_pairs(published_acceptance().query("method == 'chain'")).empty


def test_a_trace_stands_where_its_own_arm_yields_as_much():
    rows = [{"prompt_id": "p", "kind": "text", "round": n, "accepted": n % 2, "drafted": 3} for n in range(10)]
    trace = round_trace(rows, PROVENANCE | {"method": "chain", "budget": 3})
    assert trace_mark(trace, LINE) == pytest.approx(LINE.place_of(("chain", 3.0), 1.5))
    other = round_trace(rows, PROVENANCE | {"method": "tree", "budget": 3})
    assert np.isnan(trace_mark(other, LINE))
    assert trace_mark(EASY, LINE) == pytest.approx(HIGH)
