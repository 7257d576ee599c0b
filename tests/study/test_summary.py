"""Means, bootstrap intervals and histograms against hand-made tables and a known distribution."""

import numpy as np
import pandas as pd
import pytest

from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study import length_histogram, summarize, sweep, sweep_adaptive_chains, sweep_ar, sweep_chains
from kdlab.study.bootstrap import percentile_interval, ratio, resample_counts
from tests.study.fields import draft_field


def table_of(lengths: list[list[int]], **columns) -> pd.DataFrame:
    """One arm with the given round lengths, a list a prompt."""
    return pd.DataFrame([
        {
            "method": "ddtree", "setting": 4.0, "budget": 4, "rows": 5, "prompt": index, "kind": "text",
            "num_rounds": len(rounds), "tokens_per_round": np.mean(rounds) if rounds else np.nan,
            "round_lengths": rounds, "round_rows": [5] * len(rounds), "truncated": False, "simulated": False,
        } | columns
        for index, rounds in enumerate(lengths)
    ])  # fmt: skip


def test_both_means_are_given_and_differ():
    row = summarize(table_of([[4], [1, 1, 1]])).iloc[0]
    assert row["tokens_per_round"] == pytest.approx(7 / 4)
    assert row["mean_prompt_tokens_per_round"] == pytest.approx(2.5)
    assert (row["num_prompts"], row["num_rounds"]) == (2, 4)
    assert row["rounds_by_rows"] == {5: 4}


def test_fewer_than_five_prompts_have_no_interval():
    four, five = (summarize(table_of([[length] for length in range(1, last)])).iloc[0] for last in (5, 6))
    assert np.isnan(four["tokens_per_round_low"])
    assert five["tokens_per_round_low"] < five["tokens_per_round"] < five["tokens_per_round_high"]


def test_prompts_without_a_round_count_for_nothing():
    row = summarize(table_of([[2, 2], [], [4], [2], [6], [3]])).iloc[0]
    assert row["tokens_per_round"] == pytest.approx(19 / 6)
    assert row["mean_prompt_tokens_per_round"] == pytest.approx((2 + 4 + 2 + 6 + 3) / 5)
    assert np.isfinite(row["mean_prompt_tokens_per_round_high"])
    assert np.isnan(summarize(table_of([[], []])).iloc[0]["tokens_per_round"])


def test_the_bootstrap_equals_resampling_prompt_by_prompt():
    lengths = [[1, 2], [5], [3, 3, 3], [1], [7, 1], [2, 2, 2, 2]]
    row = summarize(table_of(lengths), num_resamples=300, seed=4).iloc[0]
    values = []
    for counts in resample_counts(6, 300, 4).astype(int):
        drawn = [rounds for rounds, count in zip(lengths, counts, strict=True) for _ in range(count)]
        values.append(sum(map(sum, drawn)) / sum(map(len, drawn)))
    assert row["tokens_per_round_low"] == pytest.approx(np.quantile(values, 0.025))
    assert row["tokens_per_round_high"] == pytest.approx(np.quantile(values, 0.975))


def test_intervals_cover_the_true_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    counts, hits, narrow = resample_counts(30, 400, 1), 0, 0
    for _ in range(400):
        sample = rng.geometric(0.4, size=30).astype(float)
        values = counts @ sample / 30
        low, high = percentile_interval(values, 30, 0.9)
        hits += low <= 2.5 <= high
        # A broken twin: intervals over rounds that are copies of each other are too narrow.
        middle, half = (low + high) / 2, (high - low) / 6
        narrow += middle - half <= 2.5 <= middle + half
    assert 0.83 <= hits / 400 <= 0.94
    assert narrow / 400 < 0.6


def test_the_same_seed_gives_the_same_interval_and_the_level_widens_it():
    table = table_of([[1], [2], [3], [4], [9]])
    first, again, other = summarize(table), summarize(table), summarize(table, level=0.5)
    pd.testing.assert_frame_equal(first, again)
    assert other.iloc[0]["tokens_per_round_low"] > first.iloc[0]["tokens_per_round_low"]


def test_sweeps_concatenate_and_group_by_kind():
    field = draft_field(seed=1, num_prompts=6, kinds=("code", "chat"))
    table = pd.concat([sweep(field, [0, 5]), sweep_ar(field), sweep_chains(field), sweep_adaptive_chains(field, [0.5])])
    assert len(summarize(table, num_resamples=10)) == 2 + 1 + 3 + 1
    by_kind = summarize(table, ("method", "setting", "kind"), num_resamples=10)
    assert len(by_kind) == 14
    assert by_kind["num_prompts"].unique().tolist() == [3]
    adaptive = by_kind[by_kind["method"] == "adaptive_chain"].iloc[0]
    assert sum(adaptive["rounds_by_rows"].values()) == adaptive["num_rounds"]


def test_groups_of_unequal_origin_are_refused():
    table = table_of([[1], [2]], drafter_sha256="a")
    table.loc[1, "drafter_sha256"] = "b"
    with pytest.raises(ComparisonError, match="drafter_sha256"):
        summarize(table)
    mixed = table_of([[1], [2]])
    mixed.loc[1, "simulated"] = True
    with pytest.raises(ComparisonError, match="simulated"):
        summarize(mixed)
    with pytest.raises(ComparisonError, match="rows"):
        summarize(pd.concat([table_of([[1]]), table_of([[1]], prompt=1, rows=9)]))
    with pytest.raises(ArgumentError, match="prompt 0 twice"):
        summarize(pd.concat([table_of([[1]]), table_of([[1]])]))


@pytest.mark.parametrize(
    "options", [{"level": 1.0}, {"level": "0.9"}, {"num_resamples": 0}, {"seed": -1}, {"by": ("colour",)}], ids=str
)
def test_wrong_arguments_are_refused(options):
    with pytest.raises(ArgumentError):
        summarize(table_of([[1]]), **options)


def test_the_histogram_counts_every_round_and_shows_gaps():
    histogram = length_histogram(table_of([[1, 1], [4]]))
    assert histogram["num_rounds"].tolist() == [2, 0, 0, 1]
    assert histogram["share"].sum() == pytest.approx(1.0)
    assert length_histogram(table_of([[]]))["share"].isna().all()


def test_ratio_has_no_value_over_zero():
    np.testing.assert_array_equal(ratio(np.array([1.0, 2.0]), np.array([0.0, 4.0])), [np.nan, 0.5])
