"""Tables of a profiled round: every instant counts once, shares add up, counters meet the right times and floors."""

import json

import numpy as np
import pandas as pd
import pytest

from kdlab.errors import ArgumentError
from kdlab.profiling import launches_frame
from kdlab.profiling.round_tables import (
    CALLS,
    IDLE,
    UNMARKED,
    calls_as_round,
    counted_case,
    kernel_use,
    middle_round,
    middle_times,
    round_times,
    stage_shares,
    stage_traffic,
    timelines,
)
from tests.profiling.rounds import CALL, PROVENANCE, SMALL, STAGES, WIDE, call, counted, profiled, timeline
from tests.profiling.samples import launch


@pytest.fixture(scope="module")
def launches():
    return profiled()


def timed(*spans, stage="experts"):
    """A round of launches from start to end."""
    rows = [
        launch(place, stage, source="torch.profiler", start_us=float(start), duration_us=float(end - start))
        for place, (start, end) in enumerate(spans)
    ]
    return launches_frame(rows, PROVENANCE)


@pytest.mark.parametrize(
    ("spans", "busy", "gap"),
    [
        ([(0, 10), (12, 20)], [10, 8], 2),
        ([(0, 10), (8, 20)], [10, 10], 0),  # the second began early and waited
        ([(0, 30), (8, 20), (25, 40)], [30, 0, 10], 0),  # one inside another
        ([(0, 30), (8, 12), (20, 25), (35, 40)], [30, 0, 0, 5], 5),  # a long one is not forgotten behind a short one
        ([(0, 0), (0, 5)], [0, 5], 0),
    ],
)
def test_every_instant_is_counted_once_for_the_launch_that_began_first(spans, busy, gap):
    rows = timelines(timed(*spans))
    assert rows["busy_us"].tolist() == busy
    (line,) = round_times(timed(*spans)).to_dict("records")
    assert (line["busy_us"], line["gap_us"], line["span_us"]) == (sum(busy), gap, sum(busy) + gap)


def test_rows_in_any_order_give_the_same(launches):
    shuffled = launches.sample(frac=1.0, random_state=1)
    names = ["case", "mode", "repeat"]
    one, other = (round_times(rows).sort_values(names, ignore_index=True) for rows in (launches, shuffled))
    pd.testing.assert_frame_equal(one, other)


def test_the_round_of_median_length_is_shown(launches):
    times = round_times(launches)
    assert list(times["case"].unique()) == [WIDE, SMALL]
    assert times["mode"].tolist() == ["graph"] * 3 + ["eager"] * 3 + ["graph"] * 3 + ["eager"] * 3
    rows = middle_round(launches, WIDE, "eager")
    assert set(rows["repeat"]) == {1}
    assert rows["position"].tolist() == list(range(len(STAGES) + 1))
    two = times[times["repeat"] < 2]
    for table in (times, two, two[::-1]):
        middle = middle_times(table)
        assert sorted(middle["case"] + middle["mode"]) == sorted(set(times["case"] + times["mode"]))
        for line in middle.itertuples():
            spans = sorted(table[(table["case"] == line.case) & (table["mode"] == line.mode)]["span_us"])
            assert line.span_us == spans[(len(spans) - 1) // 2]
    with pytest.raises(ArgumentError, match="no such case, graph"):
        middle_round(launches, "no such case", "graph")


def test_shares_add_up_and_what_no_stage_marks_and_what_is_idle_come_last(launches):
    shares = stage_shares(launches)
    assert shares.groupby(["case", "mode"])["share"].sum().to_numpy() == pytest.approx(1.0)
    own = shares[(shares["case"] == WIDE) & (shares["mode"] == "graph")]
    assert own["stage"].tolist()[-2:] == [UNMARKED, IDLE]
    assert list(dict.fromkeys(own["phase"])) == ["draft", "build", "verify", "accept", "commit", "other", IDLE]
    us, num = own.set_index("stage")["us"], own.set_index("stage")["launches"]
    assert (us["attention"], num["attention"], num["norms"]) == (48.0, 2, 4)
    assert us["experts"] == 118.0  # each began a microsecond early
    eager = shares[(shares["case"] == WIDE) & (shares["mode"] == "eager")].set_index("stage")["share"]
    assert eager[IDLE] > own.set_index("stage")["share"][IDLE]


def test_a_prefill_is_a_phase_of_its_own():
    rows = [row | {"phase": "prefill"} for row in timeline("a prefill", "eager", 0)]
    assert set(stage_shares(launches_frame(rows, PROVENANCE))["phase"]) == {"prefill", IDLE}


def test_two_sources_of_one_timeline_are_refused():
    rows = timeline(WIDE, "graph", 0) + [row | {"source": "nsys"} for row in timeline(WIDE, "graph", 1)]
    with pytest.raises(ArgumentError, match="nsys"):
        stage_shares(launches_frame(rows, PROVENANCE))


def test_traffic_sums_a_stage_and_takes_its_time_from_the_graph(launches):
    traffic = stage_traffic(launches).set_index("stage")
    assert traffic["case"].unique().tolist() == [WIDE]
    line = traffic.loc["experts"]
    assert (line["launches"], line["bytes"], line["l2_read"]) == (2, 2 * 60 * 1.1e6, 2 * 60 * 2e6)
    assert (line["us"], line["timed"]) == (118.0, "graph")
    assert (line["flops"], line["flops_counted"]) == (2 * 3e6 * 55.0 * 60, True)
    assert line["floor_bytes"] == PROVENANCE["floors"][WIDE]["experts"][0]
    eager = stage_traffic(launches[launches["mode"] == "eager"]).set_index("stage")
    assert set(eager["timed"]) == {"eager"}
    alone = stage_traffic(launches[launches["source"] == "ncu"]).set_index("stage")
    assert (alone["us"]["experts"], alone["timed"]["experts"]) == (1.2 * 120, "ncu")
    assert alone["floor_bytes"]["experts"] == line["floor_bytes"]


def test_counting_that_was_cut_off_is_compared_with_nothing():
    rows = timeline(WIDE, "graph", 0) + counted(WIDE)[:-10]
    line = stage_traffic(launches_frame(rows, PROVENANCE)).set_index("stage").loc["norms"]
    assert line["launches"] == 3
    assert (line["timed"], line["us"]) == ("ncu", 1.2 * 6)
    assert np.isnan(line["floor_bytes"])


def test_operations_that_were_not_counted_are_those_of_the_floor_and_without_floors_unknown():
    rows = [row | {"tensor_flops": None} for row in counted(WIDE)]
    line = stage_traffic(launches_frame(rows, PROVENANCE)).set_index("stage").loc["q_b"]
    assert (line["flops"], line["flops_counted"]) == (PROVENANCE["floors"][WIDE]["q_b"][1], False)
    line = stage_traffic(launches_frame(rows, PROVENANCE | {"floors": None})).set_index("stage").loc["q_b"]
    assert np.isnan([line["flops"], line["floor_bytes"]]).all()
    rows = [row | {"dram_write": None} for row in counted(WIDE)]
    assert stage_traffic(launches_frame(rows, PROVENANCE))["bytes"].isna().all()


def test_copies_are_launches_of_a_timeline_but_not_kernels_to_count():
    copy = {"kernel": "Memcpy DtoD (Device -> Device)", "source": "torch.profiler", "start_us": 900.0}
    rows = [*timeline(WIDE, "graph", 0), launch(99, "experts", case=WIDE, mode="graph", **copy), *counted(WIDE)]
    line = stage_traffic(launches_frame(rows, PROVENANCE)).set_index("stage").loc["experts"]
    assert (line["launches"], line["timed"], line["us"]) == (2, "graph", 128.0)


def test_use_of_a_kernel_is_weighted_by_time():
    rows = [launch(0, "experts", tensor_pct=90.0), launch(1, "router", duration_us=30.0, tensor_pct=10.0)]
    (line,) = kernel_use(launches_frame(rows, PROVENANCE)).to_dict("records")
    assert (line["tensor_pct"], line["launches"], line["stages"]) == (30.0, 2, "experts, router")
    assert np.isnan(line["dram_pct"])


def test_the_kernel_with_the_most_time_is_first_and_calls_of_ops_are_no_rounds(launches):
    use = kernel_use(launches)
    assert use["kernel"].iloc[0] == "experts_kernel"
    assert use["share"].sum() == pytest.approx(1.0)
    assert "attend" not in set(use["kernel"])


def test_a_round_counts_as_counted_when_most_of_its_time_was(launches):
    assert counted_case(launches) == WIDE
    assert counted_case(launches[launches["source"] == "ncu"]) == WIDE  # no timeline says otherwise
    assert counted_case(launches[launches["source"] != "ncu"]) is None
    cut = timeline(WIDE, "graph", 0) + counted(WIDE)[:12]
    assert counted_case(launches_frame(cut, PROVENANCE)) is None
    prefill = [row | {"phase": "prefill"} for row in counted("a prefill")]
    assert counted_case(launches_frame(prefill, PROVENANCE)) is None


def test_calls_stand_as_stages_of_one_round_one_an_op():
    other = [launch(0, "verify_attention", subject="kernels", case="verify_attention S=1 N=1 prefix=256 H=64 (wgmma)")]
    topk = [launch(0, "draft_topk", subject="kernels", case="draft_topk S=1 N=15 V=163840 K=64 (cuda)", dram_read=9.0)]
    rows = calls_as_round(launches_frame([*counted(WIDE), *call(), *other, *topk], PROVENANCE))
    traffic = stage_traffic(rows)
    assert traffic["case"].tolist() == [CALLS, CALLS]
    assert traffic["stage"].tolist() == [CALL, "draft_topk S=1 N=15 V=163840 K=64"]
    attention, topk = traffic.to_dict("records")
    assert (attention["bytes"], attention["us"], attention["timed"]) == (11e6, 45.0, "ncu")
    assert (attention["floor_bytes"], attention["flops"], attention["flops_counted"]) == (5e6, 9e8, False)
    assert np.isnan(topk["floor_bytes"])
    assert set(kernel_use(rows)["kernel"]) == {"attend", "merge", "k"}


def test_nothing_gives_empty_tables(launches):
    none = launches.iloc[:0]
    assert calls_as_round(none).empty
    for table in (round_times, stage_shares, stage_traffic, kernel_use):
        assert table(none).empty
        assert list(table(none).columns) == list(table(launches).columns)
    assert json.loads(launches["provenance"].iloc[0])["floors"]
