"""The recorded full-width rounds that ship: complete, and smooth over the row counts."""

import pytest

from kdlab.bench import read_rows
from kdlab.bench.full_width.table import jumps, point_table, stage_table
from kdlab.paths import DATA

ROUNDS = DATA / "recorded" / "rounds-h200.parquet"
recorded = pytest.mark.skipif(not ROUNDS.exists(), reason=f"no {ROUNDS.name} is recorded yet")


@recorded
def test_no_row_count_costs_a_tenth_more_than_its_neighbour_beyond_the_floor():
    points = point_table(read_rows(ROUNDS))
    assert points["rows"].nunique() > 1
    found = jumps(points)
    assert found.empty, found.to_string()
    # The same table with one round that is slower by half has a jump.
    last = points[points["streams"] == 1].index[-1]
    slower = points.assign(us=points["us"].where(points.index != last, 1.5 * points["us"]))
    assert not jumps(slower).empty


@recorded
def test_every_stage_with_a_floor_was_timed():
    stages = stage_table(read_rows(ROUNDS))
    drafted = stages[stages["rows"] > 1].groupby(["rows", "streams", "context", "g"])["stage"]
    assert drafted.agg(set).map(len).min() >= 20
    assert (stages["us"] > 0).all()
