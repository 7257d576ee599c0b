"""The recorded full-width rounds that ship: complete, and smooth over the row counts."""

import pytest

from kdlab.bench import read_rows
from kdlab.bench.full_width.table import jumps, point_table, stage_table
from kdlab.paths import DATA

ROUNDS = DATA / "recorded" / "rounds-h200.parquet"
MANY = (
    "13 jumps, to 272 rows of all streams and more but for two at 32k. Routed experts make most of each that was timed "
    "by stage: nearly all 384 are read, so that their floor stays (16.0 ms at 264 rows, 17.0 at 520, 17.4 at 1,056, "
    "17.8 at 2,080), while they take 21.5, 27.0, 33.4 and 44.7 ms, far from the rate of products. From 8 to 17 rows of "
    "32 streams q_a and kv_a add 0.9 ms. At 8k with 16 and 32 streams and at 32k with 4, 8 and 16 it is attention: 8 "
    "rows of 8 heads fill one of its tiles, 17 take three. No stage was timed alone there: that is by how much rounds "
    "of longer contexts take longer than those at 1k"
)
STREAMS = [pytest.param([1], id="one stream"), pytest.param([4, 8, 16, 32], id="more", marks=[
    pytest.mark.xfail(reason=MANY, strict=True, raises=AssertionError)])]  # fmt: skip


@pytest.mark.parametrize("streams", STREAMS)
def test_no_row_count_costs_a_tenth_more_than_its_neighbour_beyond_the_floor(streams):
    points = point_table(read_rows(ROUNDS))
    points = points[points["streams"].isin(streams)]
    assert points["rows"].nunique() > 1
    found = jumps(points)
    assert found.empty, found.to_string()


def test_experts_grow_furthest_beyond_their_floor_where_rounds_of_many_streams_jump():
    rows = read_rows(ROUNDS)
    points, stages = point_table(rows), stage_table(rows)
    found, stages = jumps(points), stages[stages["experts"] == "tp"]
    timed = found[(found["context"] == 1024) & (found["g"] == 0.8) & (found["experts"] == "tp")]
    assert len(found) == 13
    assert len(timed) == 3
    for jump in timed.itertuples():
        same = stages[(stages["streams"] == jump.streams) & (stages["context"] == 1024) & (stages["g"] == jump.g)]
        one, two = (same[same["rows"] == n].set_index("stage") for n in (jump.rows, jump.next_rows))
        beyond = two["us"] - one["us"] * two["floor_us"] / one["floor_us"]
        assert beyond.idxmax() == "experts"
        assert beyond["experts"] > 0.6 * beyond.clip(lower=0.0).sum()


def test_a_round_that_is_slower_by_half_is_a_jump():
    points = point_table(read_rows(ROUNDS))
    points = points[(points["streams"] == 1) & (points["context"] == 1024)]
    last = points["rows"] == points["rows"].max()
    assert jumps(points).empty
    assert len(jumps(points.assign(us=points["us"].where(~last, 1.5 * points["us"])))) == last.sum()


def test_every_stage_with_a_floor_was_timed():
    stages = stage_table(read_rows(ROUNDS))
    drafted = stages[stages["rows"] > 1].groupby(["rows", "streams", "context", "g"])["stage"]
    assert drafted.agg(set).map(len).min() >= 20
    assert (stages["us"] > 0).all()
