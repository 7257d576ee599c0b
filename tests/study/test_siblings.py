"""Acceptance after an accepted sibling: hand-made fields, an oracle, and a recording of the tiny pair."""

import dataclasses

import numpy as np
import pytest

import kdlab
from kdlab.decode import DraftField
from kdlab.errors import ArgumentError
from kdlab.study import acceptance_after_sibling, acceptance_by_rank
from tests.study.fields import draft_field, oracle_accepted

LOG_PROBS = np.log(np.float32([0.5, 0.3, 0.2]))


def hand_made(text, num_starts):
    """A drafter that always says 0 (0.5), 1 (0.3), 2 (0.2), over a given text; L = 3."""
    field = draft_field(num_prompts=1, positions=len(text) - 4, depth_limit=3, vocab_size=3)
    (prompt,) = field.prompts
    shape, text = prompt.token_ids.shape, np.int32(text)
    following = text[np.arange(shape[0])[:, None] + 1 + np.arange(3)]
    made = dataclasses.replace(
        prompt, output_ids=text[:-4], tail_ids=text[-4:], num_starts=num_starts,
        token_ids=np.broadcast_to(np.arange(3, dtype=np.int32), shape).copy(),
        log_probs=np.broadcast_to(LOG_PROBS, shape).copy(), next_rank=following, next_log_prob=LOG_PROBS[following],
    )  # fmt: skip
    return DraftField([made], 3, 3, 3, {})


def row(table, depth, prefix):
    return table[(table["depth"] == depth) & (table["prefix"] == prefix)].iloc[0]


def test_a_hand_made_field_is_counted_by_hand():
    # The next three tokens (which are their own ranks) of positions 0..3: 001, 010, 100, 002.
    table = acceptance_after_sibling(hand_made([0, 0, 0, 1, 0, 0, 2, 0], num_starts=4), budget=39)
    top = row(table, 2, "top path")
    assert (top["num_positions"], top["hits"]) == (3, 2)
    assert (top["observed"], top["predicted"]) == pytest.approx((2 / 3, 0.5))
    assert top["gap"] == pytest.approx(2 / 3 - 0.5)
    assert top["mean_log_prob"] == pytest.approx((2 * np.log(0.5) + np.log(0.3)) / 3)
    assert row(table, 2, "sibling just before")[["num_positions", "hits"]].tolist() == [1, 1]
    assert row(table, 2, "sibling earlier")["num_positions"] == 0
    assert np.isnan(row(table, 2, "sibling earlier")["observed"])
    assert row(table, 3, "top path")[["num_positions", "hits"]].tolist() == [2, 0]
    assert row(table, 3, "sibling just before")[["num_positions", "hits"]].tolist() == [1, 1]
    assert row(table, 3, "sibling earlier")[["num_positions", "hits"]].tolist() == [1, 1]


def test_a_prefix_that_the_tree_does_not_hold_does_not_count():
    field = hand_made([0, 0, 0, 1, 0, 0, 2, 0], num_starts=4)
    table = acceptance_after_sibling(field, budget=1)
    off = table[table["prefix"] != "top path"]
    assert (off["num_positions"] == 0).all()
    assert row(table, 2, "top path")["num_positions"] == 3


@pytest.mark.parametrize("budget", [0, 3, 20])
@pytest.mark.parametrize("options", [{}, {"ties": True}, {"top_k": 3}, {"stop": True}])
def test_counts_are_those_of_an_oracle(budget, options):
    field = draft_field(5, 2, positions=14, **options)
    expected = {}
    for prompt in field.prompts:
        for position in range(prompt.num_starts):
            tokens = prompt.token_ids[position, :, 0]
            is_best = [prompt.next_ids[position, level] == tokens[level] for level in range(3)]
            for depth in range(1, min(oracle_accepted(prompt, position, budget), 2) + 1):
                before = is_best[:depth]
                name = "top path" if all(before) else "sibling earlier" if before[-1] else "sibling just before"
                number, hits = expected.get((depth + 1, name), (0, 0))
                expected[depth + 1, name] = (number + 1, hits + is_best[depth])
    table = acceptance_after_sibling(field, budget)
    for line in table.itertuples():
        assert (line.num_positions, line.hits) == expected.get((line.depth, line.prefix), (0, 0))
    assert len(table) == 6


def test_rows_of_no_finite_draft_are_left_out():
    field = hand_made([0] * 8, num_starts=4)
    field.prompts[0].log_probs[:, 2] = np.nan
    table = acceptance_after_sibling(field, budget=20)
    assert row(table, 2, "top path")["num_positions"] == 4
    assert (table.loc[table["depth"] == 3, "num_positions"] == 0).all()


@pytest.fixture(scope="module")
def recorded():
    pair = kdlab.load_pair("tiny")
    return kdlab.record(pair, "def f(x):\n    return ", top_k=16, max_new_tokens=32)


@pytest.mark.parametrize("budget", [4, 16])
def test_the_groups_of_a_recording_add_up_to_the_conditional_acceptance_of_rank_0(recorded, budget):
    table = acceptance_after_sibling(recorded, budget).groupby("depth")[["num_positions", "hits"]].sum()
    by_rank = acceptance_by_rank(recorded, budget, max_rank=1).set_index("depth").loc[2:]
    assert table["num_positions"].tolist() == by_rank["num_conditional"].tolist()
    hits = (by_rank["conditional"].fillna(0.0) * by_rank["num_conditional"]).round().astype(int)
    assert table["hits"].tolist() == hits.tolist()
    assert table["num_positions"].sum() > 0


def test_a_bad_budget_is_refused():
    with pytest.raises(ArgumentError, match="budget"):
        acceptance_after_sibling(draft_field(), -1)
