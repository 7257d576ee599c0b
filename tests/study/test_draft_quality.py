"""Acceptance by depth and rank, calibration and missed mass against counts made by hand."""

import dataclasses

import numpy as np
import pytest

from kdlab.decode.field import DraftField
from kdlab.errors import ArgumentError
from kdlab.study import acceptance_by_depth, acceptance_by_rank, calibration, min_budget, missed_mass, sweep
from tests.study.fields import draft_field


def test_depths_add_up_to_the_tokens_of_the_sweep():
    field = draft_field(seed=1, stop=True)
    table, rounds = acceptance_by_depth(field, 5), sweep(field, [5])
    tokens = sum(map(sum, rounds["round_lengths"]))
    assert table["num_rounds"].unique().tolist() == [rounds["num_rounds"].sum()]
    assert table["num_accepted"].sum() + rounds["num_rounds"].sum() == tokens
    assert (table["num_reached"].iloc[1:].to_numpy() == table["num_accepted"].iloc[:-1].to_numpy()).all()
    assert np.prod(table["conditional"]) == pytest.approx(table["cumulative"].iloc[-1])


def test_budget_zero_accepts_nothing_and_deeper_depths_have_no_rate():
    table = acceptance_by_depth(draft_field(), 0)
    assert table["num_accepted"].sum() == 0
    assert np.isnan(table["conditional"].iloc[1])


@pytest.mark.parametrize("budget", [None, 4])
def test_ranks_equal_counts_by_hand(budget):
    field = draft_field(seed=2, stop=True)
    needed = min_budget(field)
    table = acceptance_by_rank(field, budget, max_rank=4)
    for row in table.to_dict("records"):
        hits = given = both = total = 0
        for prompt, prompt_needed in zip(field.prompts, needed, strict=True):
            for position in range(prompt.num_starts):
                depth = row["depth"] - 1
                hit = prompt.next_rank[position, depth] == row["rank"]
                if budget is None:
                    reached = (prompt.next_rank[position, :depth] == 0).all()
                else:
                    reached = depth == 0 or prompt_needed[position, depth - 1] <= budget
                hits, given, both, total = hits + hit, given + reached, both + (hit and reached), total + 1
        assert row["num_positions"] == total
        assert row["probability"] == pytest.approx(hits / total)
        assert row["num_conditional"] == given
        assert row["conditional"] == pytest.approx(both / given)


def test_all_ranks_together_are_certain():
    table = acceptance_by_rank(draft_field(seed=3), max_rank=6)
    np.testing.assert_allclose(table.groupby("depth")["probability"].sum(), 1.0)


def honest_field(sharpness: float) -> DraftField:
    """Depth 1 of a draft whose target draws from the very distribution, or from a flatter one."""
    rng = np.random.default_rng(0)
    field = draft_field(seed=4, num_prompts=1, positions=4000, depth_limit=1, vocab_size=5)
    prompt = field.prompts[0]
    p_target = np.exp(prompt.log_probs[:, 0].astype(float) * sharpness)
    p_target /= p_target.sum(axis=1, keepdims=True)
    chosen = (p_target.cumsum(axis=1) > rng.random((4000, 1))).argmax(axis=1)
    all_ids = np.concatenate([[0], np.take_along_axis(prompt.token_ids[:, 0], chosen[:, None], 1)[:, 0], [0]])
    honest = dataclasses.replace(prompt, output_ids=all_ids[:4000], tail_ids=all_ids[4000:])
    return DraftField([honest], 5, 5, 1)


def test_a_calibrated_draft_has_a_small_error_and_a_flat_one_a_large_error():
    good, flat = calibration(honest_field(1.0), max_rank=1), calibration(honest_field(3.0), max_rank=1)
    assert good["calibration_error"].iloc[0] < 0.02
    assert flat["calibration_error"].iloc[0] > 0.1
    assert (flat["observed"] - flat["mean_predicted"]).dropna().mean() > 0


def test_calibration_counts_every_entry_once():
    field = draft_field(seed=5, stop=True)
    table = calibration(field, bins=4)
    starts = sum(prompt.num_starts for prompt in field.prompts)
    assert (table.groupby("depth")["num_entries"].sum() == starts * 6).all()
    chosen = (table["observed"] * table["num_entries"]).groupby(table["depth"]).sum()
    np.testing.assert_allclose(chosen, starts)
    assert table["bin_low"].tolist()[:4] == [0.0, 0.25, 0.5, 0.75]


def test_calibration_where_the_prefix_was_drafted_uses_fewer_positions():
    field = draft_field(seed=5)
    given, everywhere = calibration(field, given_budget=2), calibration(field)
    entries = [table.groupby("depth")["num_entries"].sum().to_numpy() for table in (given, everywhere)]
    assert entries[0][0] == entries[1][0]
    assert (entries[0][1:] < entries[1][1:]).all()


def test_missed_mass_is_what_the_kept_candidates_leave():
    whole, cut = missed_mass(draft_field(seed=6)), missed_mass(draft_field(seed=6, top_k=2))
    np.testing.assert_allclose(whole["maximum"], 0.0, atol=1e-6)
    assert (whole["next_outside"] == 0).all()
    field = draft_field(seed=6, top_k=2)
    ranks = np.concatenate([prompt.next_rank for prompt in field.prompts])
    np.testing.assert_allclose(cut["next_outside"], (ranks >= 2).mean(axis=0))
    assert (cut["mean"] > 0.01).all()
    assert (cut["median"] <= cut["p90"]).all()


def test_broken_draft_rows_are_left_out():
    field = draft_field(seed=7, num_prompts=1)
    prompt = field.prompts[0]
    log_probs = prompt.log_probs.copy()
    log_probs[:5, 1] = np.nan
    broken = DraftField([dataclasses.replace(prompt, log_probs=log_probs)], 6, 6, 3)
    assert missed_mass(broken)["num_positions"].tolist() == [20, 15, 20]
    assert calibration(broken).groupby("depth")["num_entries"].sum().tolist() == [120, 90, 120]


@pytest.mark.parametrize(
    "call",
    [
        lambda field: acceptance_by_depth(field, -1),
        lambda field: acceptance_by_rank(field, 1.5),
        lambda field: acceptance_by_rank(field, max_rank=0),
        lambda field: calibration(field, 0),
        lambda field: calibration(field, max_rank=7),
        lambda field: calibration(field, given_budget=True),
    ],
)
def test_wrong_numbers_are_refused(call):
    with pytest.raises(ArgumentError):
        call(draft_field())
