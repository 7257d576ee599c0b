"""The recorded times that ship: of one H200 run over every op, within what the card can do; of rounds on two."""

import json

import pytest

from kdlab.bench import read_rows
from kdlab.bench.collectives import RECORDED, ROWS, collective_table
from kdlab.bench.full_width import rank_table as ranks
from kdlab.bench.full_width.rank_table import MOST_APART, rank_table
from kdlab.bench.kernels import COUNTED_SIZES, HEADS, OPS, error_table, kernel_table
from kdlab.paths import DATA
from kdlab.study import collectives as study
from kdlab.study.collectives import LARGE_BYTES, fit_all_reduce

ROUNDS = DATA / "recorded" / "rounds-2gpu.parquet"
KERNELS, COUNTERS = DATA / "recorded" / "kernels-h200.parquet", DATA / "recorded" / "counters-h200.parquet"


def ceilings_of(rows):
    """What the card could do in a run, by name: the more the better."""
    found = rows[rows["op"] == "ceiling"]
    names = [json.loads(case)["of"] for case in found["case"]]
    return (found["value"] ** found["unit"].map(lambda unit: -1 if unit == "us" else 1)).set_axis(names)


def assert_no_faster_than_the_card(rows, slowed=1.0):
    """Own kernels take as long as their bytes and operations do at the run's ceilings, `slowed` times what they are."""
    table = kernel_table(rows)
    own = table[table["own"] & (table["mode"] == "graph")]
    # A launch that begins while the one before ends takes less than a lone one of a kernel that does nothing: 0.8 of
    # 1.1 us where a norm is all there is to do.
    launch_us = 1.0 / ceilings_of(rows)["launch"]
    assert (own.loc[own["floor_us"] > launch_us, "roofline"] < 1.05 * slowed).all(), "what is timed is in a cache"
    assert (own["roofline"] < 1.4 * slowed).all()


def test_recorded_times_are_of_every_op_at_all_heads():
    rows = read_rows(KERNELS)
    assert "H200" in rows["gpu"].iloc[0]
    table = kernel_table(rows)
    assert set(table["op"]) == set(OPS)
    assert set(table["heads"].dropna()) == set(HEADS)
    assert (table.loc[table["impl"] == "naive", "prefix"] <= 4096).all()
    assert_no_faster_than_the_card(rows)
    with pytest.raises(AssertionError):  # the best of them are within a tenth of their floors
        assert_no_faster_than_the_card(rows.assign(median=0.85 * rows["median"]))
    assert set(error_table(rows)["op"]) == set(OPS)
    assert KERNELS.stat().st_size < 3_000_000


def test_recorded_counters_show_the_naive_kernel_read_the_keys_once_a_row_and_head():
    rows = read_rows(COUNTERS)
    reads = rows[rows["metric"] == "l1_read"].set_index("impl")["value"]
    keys = (COUNTED_SIZES["prefix"] + COUNTED_SIZES["rows"]) * 576 * 2
    passes = COUNTED_SIZES["rows"] * COUNTED_SIZES["heads"]
    assert reads["naive"] == pytest.approx(passes * keys, rel=0.1)
    assert reads["mma"] < reads["naive"] / 30


def test_recorded_collectives_are_of_every_size_and_longer_the_more_they_move():
    rows = read_rows(RECORDED)
    assert all(json.loads(text)["nccl"] for text in rows["provenance"])
    table = collective_table(rows)
    assert (table["p10"] <= table["us"]).all()
    assert (table["us"] <= table["p90"]).all()
    for _, sums in table[table["op"] == "all_reduce"].groupby("ranks"):
        assert tuple(sums["rows"]) == ROWS
        us = sums.set_index("rows")["us"]
        assert 2 < us[1] < us[33] < us[65] < us[520] < us[2080]
        assert us[2080] * 4.5e5 > sums["bytes"].max()  # no link carries more than 450 GB/s in one direction


def test_recorded_rounds_of_two_gpus_take_what_a_slice_the_collectives_and_their_waits_let_expect():
    rows, times = read_rows(ROUNDS), read_rows(RECORDED)
    found = rank_table(rows, times)
    for split in ("tp", "ep"):
        same = found[found["experts"] == split]
        assert {(1, 1), (33, 1), (33, 8)} <= set(zip(same["rows"], same["streams"], strict=True))
    assert found["difference"].abs().max() < 0.5 * MOST_APART
    assert (found["us"] / found["slice_us"] - 1.0 > MOST_APART).all()  # the slice alone would not do
    without = found["us"] / (found["slice_us"] + found["collectives_us"]) - 1.0
    assert without.max() > MOST_APART  # nor would it with the collectives but without waits


def test_recorded_rounds_of_two_gpus_wait_longer_where_experts_are_products_of_matrices(monkeypatch):
    rows, times = read_rows(ROUNDS), read_rows(RECORDED)
    found = rank_table(rows, times).set_index(["rows", "streams", "context", "experts"])
    waits = found["waits_us"]
    assert waits[9, 8, 1024, "tp"] > 4 * waits[9, 8, 1024, "ep"] > 0  # 72 rows: sliced experts are, whole ones are not
    monkeypatch.setattr(ranks, "experts_are_products", lambda target, step: False)
    one = rank_table(rows, times)
    far = one[one["difference"].abs() > MOST_APART]
    assert set(far["rows"] * far["streams"]) == {128, 136}
    assert (far["difference"] > 0).all()


def test_recorded_all_reduces_take_a_step_where_the_fit_has_it(monkeypatch):
    rows = read_rows(RECORDED)
    us = collective_table(rows).query("op == 'all_reduce' and ranks == 2").set_index("bytes")["us"]
    small, large = us[us.index <= LARGE_BYTES], us[us.index > LARGE_BYTES]
    steps = us.diff() / us.index.diff()
    assert steps.idxmax() == large.index[0]
    assert large.iloc[0] > 1.5 * small.iloc[-1]
    worst = max(map(abs, fit_all_reduce(rows).residuals))
    assert worst < 0.15
    monkeypatch.setattr(study, "LARGE_BYTES", small.index[-2])
    assert max(map(abs, fit_all_reduce(rows).residuals)) > 1.5 * worst
