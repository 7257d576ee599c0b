"""The recorded full-width rounds that ship: complete, and smooth over the row counts."""

import pytest

from kdlab.bench import read_rows
from kdlab.bench.full_width.table import jumps, point_table, stage_table
from kdlab.paths import DATA

ROUNDS = DATA / "recorded" / "rounds-h200.parquet"
MANY = (
    "12 jumps, all to 272 rows of all streams and more. Routed experts make most of each that was timed by stage: all "
    "384 are read, so that their floor stays (16.0 ms at 264 rows, 17.0 at 520, 17.3 at 1,056, 17.7 at 2,080), while "
    "they take 23.7, 28.6, 36.0 and 60.3 ms, far from the rate of products. From 8 to 17 rows of 32 streams q_a "
    "and kv_a add 1.9 ms (cuBLAS takes 2.9 ms for 544 rows, 2.6 for 1,056). At 8k attention adds about 4 ms with 16 "
    "streams and 7 with 32: 8 rows of 8 heads fill one of its tiles, 17 take three. No stage was timed alone there: "
    "that is by how much rounds at 8k take longer than those at 1k"
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
    found = jumps(points)
    timed = found[(found["context"] == 1024) & (found["g"] == 0.8)]
    assert len(found) == 12
    assert len(timed) == 2
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
