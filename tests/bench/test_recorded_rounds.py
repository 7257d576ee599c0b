"""The recorded full-width rounds that ship: complete, and smooth over the row counts."""

import pytest

from kdlab.bench import read_rows
from kdlab.bench.full_width.suite import ROWS
from kdlab.bench.full_width.table import KEYS, jumps, part_table, point_table, stage_table
from kdlab.paths import DATA

ROUNDS = DATA / "recorded" / "rounds-h200.parquet"
ONE_RANK = DATA / "recorded" / "rounds-1rank-h200.parquet"
MANY = (
    "9 jumps, all with 8 streams or more. From 33 to 65 rows of 32 streams (3) it is routed experts: all 384 are read "
    "at both, so that their floor stays (17.3 and 17.8 ms), while sliced ones take 29.0 and 42.1 ms, far from the rate "
    "of products. So it is from 8 to 17 rows of 32 streams at 1k (2; their floor 16.5 and 17.1 ms, their time 19.7 and "
    "23.5). From 8 to 17 rows at 8k with 16 and 32 streams and at 32k with 8 and 16 (4) it is attention, wherever "
    "stages were timed (not with 32 streams): 8 rows of 8 heads fill one of its tiles, 17 take three"
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


def test_attention_of_long_contexts_or_experts_of_many_rows_make_the_jumps_that_were_timed_by_stage():
    rows = read_rows(ROUNDS)
    points, stages = point_table(rows), stage_table(rows)
    found, largest = jumps(points), {}
    assert len(found) == 9
    assert found["streams"].min() == 8
    for jump in found.itertuples():
        same = stages.query("streams == @jump.streams and context == @jump.context and g == @jump.g")
        same = same[same["experts"] == jump.experts]
        one, two = (same[same["rows"] == n].set_index("stage") for n in (jump.rows, jump.next_rows))
        if one.empty or two.empty:
            continue
        beyond = two["us"] - one["us"] * two["floor_us"] / one["floor_us"]
        largest[jump.rows, jump.streams, jump.context] = beyond.idxmax()
        assert beyond.max() > 0.75 * beyond.clip(lower=0.0).sum()
    assert largest == {
        (8, 32, 1024): "experts",
        (33, 32, 1024): "experts",
        (8, 16, 8192): "attention",
        (8, 8, 32768): "attention",
        (8, 16, 32768): "attention",
    }


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


def test_parts_of_stages_were_timed_wherever_stages_were():
    rows = read_rows(ROUNDS)
    parts, stages = part_table(rows), stage_table(rows)
    timed = len(stages[KEYS].drop_duplicates())
    assert parts["part"].value_counts().to_dict() == {"final norm": timed, "shared expert": timed}
    both = parts.merge(stages, on=[*KEYS, "stage"], suffixes=("", "_of_stage"))
    assert (both["us"] < both["us_of_stage"]).all()


def test_whole_layers_were_timed_on_one_gpu_at_every_number_of_rows():
    points = point_table(read_rows(ONE_RANK))
    assert set(points.loc[points["context"] == 1024, "rows"]) == set(ROWS)
    assert (points["ranks"] == 1).all()
    assert (points["collectives_us"] == 0.0).all()
    assert points["stages_us"].notna().all()
