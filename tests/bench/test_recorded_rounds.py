"""The recorded full-width rounds that ship: complete, and smooth over the row counts."""

import pytest

from kdlab.bench import read_rows
from kdlab.bench.full_width.table import jumps, point_table, stage_table
from kdlab.paths import DATA

ROUNDS = DATA / "recorded" / "rounds-h200.parquet"
MANY = "experts of many rows: 28.7 ms for a floor of 15.6 at 264 rows of all streams, 58.4 ms for 16.6 at 520"
STREAMS = [pytest.param([1], id="one stream"), pytest.param([4, 8, 16, 32], id="more", marks=[
    pytest.mark.xfail(reason=MANY, strict=True, raises=AssertionError)])]  # fmt: skip


@pytest.mark.parametrize("streams", STREAMS)
def test_no_row_count_costs_a_tenth_more_than_its_neighbour_beyond_the_floor(streams):
    points = point_table(read_rows(ROUNDS))
    points = points[points["streams"].isin(streams)]
    assert points["rows"].nunique() > 1
    found = jumps(points)
    assert found.empty, found.to_string()


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
