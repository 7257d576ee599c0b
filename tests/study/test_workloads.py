"""Workloads: acceptance gathered from sweeps, mixed by rounds, and placed on a line from hard to easy text."""

import numpy as np
import pytest

from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study import summarize
from kdlab.study.sweep_file import sweep_arms
from kdlab.study.workloads import Line, Profile, Workload
from tests.study.fields import draft_field

TABLE = sweep_arms(draft_field(3, 12, kinds=("text", "code"), follow=0.8), (1, 3, 5))
HARD = sweep_arms(draft_field(4, 6, follow=0.2), (1, 3, 5))


def profile(name="text", table=TABLE):
    return Profile.of(table[table["kind"] == name], name)


def test_a_profile_yields_what_the_summary_says():
    text = TABLE[TABLE["kind"] == "text"]
    summary = summarize(text).set_index(["method", "setting"])
    work = Workload(((profile(), 1.0),))
    for arm in work.arms:
        assert work.tokens_per_round(*arm) == pytest.approx(summary.loc[arm, "tokens_per_round"])
    yields = work.yields()
    assert yields.tokens[0].tolist() == pytest.approx([work.tokens_per_round(*arm) for arm in work.arms])
    assert yields.shares.sum(axis=-1) == pytest.approx(np.ones((1, len(work.arms))))


def test_a_mix_counts_rounds_not_prompts():
    easy, hard = profile(), Profile.of(HARD, "hard")
    mix = Workload(((easy, 0.25), (hard, 0.75)))
    for arm in (("chain", 3.0), ("ddtree", 5.0), ("ar", 0.0)):
        ends = [Workload(((one, 1.0),)).tokens_per_round(*arm) for one in (easy, hard)]
        assert mix.tokens_per_round(*arm) == pytest.approx(0.25 * ends[0] + 0.75 * ends[1])
        assert mix.yields().tokens[0][mix.arms.index(arm)] == pytest.approx(mix.tokens_per_round(*arm))


def test_speed_is_tokens_over_the_mean_time_of_rounds():
    work = Workload(((profile(), 1.0),))
    speeds = work.yields().speeds(lambda rows, method: 10.0 * rows + (50.0 if method == "ar" else 100.0))[0]
    arms = list(work.arms)
    assert speeds[arms.index(("ar", 0.0))] == pytest.approx(1 / 60)
    assert speeds[arms.index(("chain", 3.0))] == pytest.approx(work.tokens_per_round("chain", 3) / 140)
    cut = ("adaptive_chain", 0.4)
    rows = summarize(TABLE[TABLE["kind"] == "text"]).set_index(["method", "setting"]).loc[cut, "rows_per_round"]
    assert speeds[arms.index(cut)] == pytest.approx(work.tokens_per_round(*cut) / (10 * rows + 100))


def test_streams_of_different_rows_cost_their_mean_number_of_rows_and_no_luck():
    work, arms = Workload(((profile(), 1.0),)), list(profile().arms)
    yields = work.yields()

    def root(rows, method):
        return float(rows) ** 0.5

    one, many = yields.speeds(root)[0], yields.speeds(root, streams=8)[0]
    fixed, adaptive = arms.index(("chain", 3.0)), arms.index(("adaptive_chain", 0.4))
    assert one[fixed] == pytest.approx(many[fixed])
    assert one[adaptive] > many[adaptive], "the mean of roots is below the root of the mean"


def test_resampled_prompts_scatter_around_the_whole():
    work = Workload(((profile(), 0.5), (Profile.of(HARD, "hard"), 0.5)))
    drawn = work.yields(400).tokens[:, list(work.arms).index(("chain", 3.0))]
    assert drawn.std() > 0
    assert drawn.mean() == pytest.approx(work.tokens_per_round("chain", 3), rel=0.03)
    assert (work.yields(5).tokens == work.yields(5).tokens).all()


def test_a_line_orders_kinds_and_places_figures():
    line = Line.of({"text": profile(), "hard": Profile.of(HARD, "hard")})
    assert [one.name for one in line.profiles] == ["hard", "text"]
    low, high = line.places()
    middle = line.at((low + high) / 2)
    assert middle.tokens_per_round("chain", 3) == pytest.approx((low + high) / 2)
    assert line.place_of(("chain", 3), high) == pytest.approx(high)
    assert line.place_of(("ddtree", 3), middle.tokens_per_round("ddtree", 3)) == pytest.approx((low + high) / 2)
    assert np.isnan(line.place_of(("chain", 3), high + 0.1))
    assert np.isnan(line.place_of(("chain", 15), high))
    assert np.isnan(line.place_of(("ar", 0), 1.0)), "AR tells no text from another"
    with pytest.raises(ArgumentError, match="place"):
        line.at(high + 0.1)


def test_what_does_not_belong_together_is_refused():
    with pytest.raises(ArgumentError, match="table"):
        Profile.of(TABLE[:0], "none")
    other = TABLE.assign(drafter_sha256=["a" if index % 2 else "b" for index in range(len(TABLE))])
    with pytest.raises(ComparisonError, match="drafter_sha256"):
        Profile.of(other, "text")
    text = TABLE[TABLE["kind"] == "text"]
    one_less = text.drop(text.index[(text["method"] == "chain") & (text["prompt"] == text["prompt"].max())])
    with pytest.raises(ComparisonError, match=r"^prompt: chain"):
        Profile.of(one_less, "text")
    with pytest.raises(ArgumentError, match="sum to 1"):
        Workload(((profile(), 0.5),))
    fewer = Profile.of(text[text["method"] != "ar"], "fewer")
    with pytest.raises(ArgumentError, match="same arms"):
        Workload(((profile(), 0.5), (fewer, 0.5)))
    with pytest.raises(ArgumentError, match="as hard as"):
        Line.of({"a": profile(), "b": profile()})
    with pytest.raises(ArgumentError, match="setting"):
        Workload(((profile(), 1.0),)).tokens_per_round("chain", 9)
