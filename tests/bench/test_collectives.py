"""Collectives of a round: what chains of them compute, how long their messages are, and the tables of their times."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from kdlab.bench import timing, write_rows
from kdlab.bench.collectives import CollectiveTimes, collective_table, gather_chain, messages, sum_chain
from kdlab.bench.full_width.rank_table import rank_table, rank_verdict
from kdlab.bench.full_width.suite import rank_points
from kdlab.bench.rows import bench_row, rows_frame
from kdlab.cli import main
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError
from kdlab.kernels.add_norm import add_norm
from kdlab.kernels.draft_topk import draft_topk_shard
from kdlab.kernels.sample_shards import target_sample_shard
from kdlab.model.rank_heads import gather_fields
from kdlab.model.ranks import ONE_RANK, Ranks, init_ranks
from kdlab.paths import K26_SHAPES
from kdlab.study.step_cost import Step
from tests.rank_processes import run_ranks, values_of

CPU, WIDTH, LINKS = torch.device("cpu"), 16, 5
TARGET, DRAFTER = TargetConfig.load(K26_SHAPES / "target"), DrafterConfig.load(K26_SHAPES / "drafter")


def on_two_ranks(rank):
    ranks = init_ranks("cpu")
    summed = sum_chain(ranks, 3, WIDTH, links=LINKS, device=CPU, dtype=torch.float64)()
    gathered = gather_chain(ranks, 24, links=LINKS, device=CPU)()
    largest = ranks.largest([1.0 + rank, 5.0 - rank])
    first = ranks.first(1)
    assert (first is None) == (rank == 1)
    if first is not None:
        assert first.all_reduce(torch.ones(1), "mlp").item() == 1
    ranks.close()
    return [one.numpy() for one in summed], gathered.numpy(), dict(ranks.calls), largest


def test_chains_add_up_and_gather_as_often_as_they_have_links(tmp_path):
    stream, update = torch.ones(2, 3, WIDTH, dtype=torch.float64).unbind()
    for _ in range(LINKS):
        stream, update = add_norm(stream, update, torch.ones(WIDTH, dtype=torch.float64), 1e-6)
        update = 2 * update
    alone = sum_chain(ONE_RANK, 3, WIDTH, links=LINKS, device=CPU, dtype=torch.float64)()
    for summed, gathered, calls, largest in values_of(run_ranks(2, on_two_ranks, folder=tmp_path)):
        assert np.allclose(summed, torch.stack([stream, update]))
        assert not np.allclose(summed[1], alone[1])
        assert gathered.tolist() == [LINKS] * 24
        assert calls == {"mlp": LINKS, "head": LINKS, "check": 1}
        assert largest == [2.0, 5.0]


class Counting(Ranks):
    """A rank that notes how many bytes it would send."""

    def all_gather(self, x, kind):
        sent.append(x.nbytes)
        return x.expand(self.size, *x.shape)


sent = []


@pytest.mark.parametrize(("streams", "rows"), [(1, 1), (1, 33), (8, 65)])
def test_messages_are_as_long_as_those_that_ranks_send(streams, rows):
    sent.clear()
    ranks = Counting.slice_of(0, 8)
    gather_fields(ranks, draft_topk_shard(torch.zeros(streams, 7, 128), 64, first_id=0))
    stream, position = torch.arange(streams), torch.zeros(streams, rows, dtype=torch.int64)
    draw = dict(temperature=0.0, top_p=1.0, seed=0, stream=stream, position=position)
    gather_fields(ranks, target_sample_shard(torch.zeros(streams, rows, 128), first_id=0, **draw))
    found = messages(DRAFTER, 8, streams=streams, rows=rows)
    assert [found["draft_topk"], found["target_sample"]] == sent
    assert found["features"] == streams * 8 * 7168 // 8 * 2


class SlowNeighbour(Ranks):
    """One of two ranks, of which the other one takes ten times as long."""

    def largest(self, values):
        return [10.0 * value for value in values]

    def all_reduce(self, x, kind):
        self.calls[kind] += 1
        return x


def test_ranks_take_as_many_samples_as_the_slowest_has_time_for(monkeypatch):
    now = [0.0]

    def times(runs):
        found = []
        for run in runs:
            before = now[0]
            run()
            found.append(now[0] - before)
        return found

    def work():
        now[0] += 1000.0

    monkeypatch.setattr(timing, "times_us", times)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    passes = {"": timing.Pass(work, 1, ())}
    ranks = SlowNeighbour(0, 2, group=object())
    slow = timing.sample(passes, 0.2, ranks)[""]
    alone = timing.sample(passes, 0.2)[""]
    assert set(slow) == {10_000.0}
    assert set(alone) == {1000.0}
    assert len(slow) < len(alone)
    assert ranks.calls["check"] > 1  # a meeting before the first run, and before every burst


def collective_rows(ranks=4):
    """Made-up times: an all-reduce of T rows takes 10 + T us, a gathering 5 us."""
    rows = []
    sums = {n: {"what": "residual", "rows": n, "width": 7168, "bytes": 2 * 7168 * n} for n in (1, 65, 520)}
    sizes = [("all_reduce", case, 10.0 + n) for n, case in sums.items()]
    sizes += [("all_gather", {"what": "features", "rows": 8, "bytes": n}, 5.0) for n in (24, 114688)]
    for op, case, us in sizes:
        for metric, value in ((op, us), ("chain", us + 2.0), ("between", 2.0)):
            samples = [value - 1.0, value, value + 1.0]
            whole = {"ranks": ranks, "dtype": "bfloat16", **case}
            rows.append(bench_row(op, metric, "us", provenance={}, case=whole, samples=samples))
    return rows_frame(rows)


def test_times_stand_between_the_sizes_that_were_measured():
    table = collective_table(collective_rows())
    assert table["us"].tolist() == [11.0, 75.0, 530.0, 5.0, 5.0]
    assert (table["chain_us"] - table["between_us"]).tolist() == table["us"].tolist()
    times = CollectiveTimes(collective_rows())
    step = Step.routed(TARGET, 33, 0.8, ranks=8, top_k=32)
    sums = 123 * (10 + 33) + 13 * (10 + 8)
    assert times.round_us(TARGET, DRAFTER, step, 4) == pytest.approx(sums + 3 * 5)
    ar = Step.routed(TARGET, 1, 0.8, ranks=8)
    assert times.round_us(TARGET, None, ar, 4) == pytest.approx(123 * 11 + 5)
    with pytest.raises(ArgumentError, match="over 8 ranks"):
        times.round_us(TARGET, None, ar, 8)
    with pytest.raises(ArgumentError, match="1 to 520"):
        times.round_us(TARGET, DRAFTER, replace(step, streams=32), 4)


def test_times_that_stand_twice_or_not_at_all_are_refused():
    rows = collective_rows()
    for metric in ("all_reduce", "chain"):
        twice = pd.concat([rows, rows[rows["metric"] == metric].head(1)])
        with pytest.raises(ArgumentError, match=f"each time once, got {metric} of .* twice"):
            collective_table(twice)
    with pytest.raises(ArgumentError, match="rows of `kdlab bench collectives`, got none"):
        collective_table(rows[rows["metric"] == "chain"])


def round_rows(us, slice_us, gpus=4, g=0.8, rows=33):
    case = {"rows": rows, "streams": 1, "context": 1024, "g": g, "experts": "tp"}
    case |= {"ranks": 8, "layers": 61, "gpus": gpus}
    columns = {"provenance": {}, "rows": rows, "streams": 1, "context": 1024, "case": case}
    rows = [bench_row("round", name, "us", samples=[value] * 3, **columns) for name, value in
            (("round", us), ("slice", slice_us))]  # fmt: skip
    return [*rows, *(bench_row("round", name, "us", value=1.0, **columns) for name in ("floor", "loop"))]


def test_rounds_are_held_against_their_slices_and_collectives_with_waits_of_one_length_a_kind():
    expected = 123 * 43 + 13 * 18 + 15
    for over, apart, without, verdict in (
        ((1.0, 1.0), (0.0, 0.0), "2 of 2 rounds within 5%, +0.0% to +0.0%", "elsewhere): 2,"),
        ((1.07, 1.07), (0.0, 0.0), "0 of 2 rounds within 5%, +7.0% to +7.0%", "elsewhere): 2,"),
        ((1.0, 1.2), (-0.076, 0.109), "1 of 2 rounds within 5%, +0.0% to +20.0%", "elsewhere): 0, the furthest 10.9%"),
    ):
        rows = [row for times, g in zip(over, (0.8, 1.0), strict=True)
                for row in round_rows(times * (9000.0 + expected), 9000.0, g=g)]  # fmt: skip
        table = rank_table(rows_frame(rows), collective_rows())
        assert table["collectives_us"].tolist() == pytest.approx([expected] * 2)
        assert table["waits_us"].nunique() == 1
        assert sorted(table["difference"]) == pytest.approx(apart, abs=1e-3)
        assert without in rank_verdict(table)
        assert verdict in rank_verdict(table)
    both = [*round_rows(15_000.0, 9000.0), *round_rows(40_000.0, 20_000.0, rows=128)]
    table = rank_table(rows_frame(both), collective_rows()).set_index("rows")
    assert table["difference"].abs().max() < 1e-9
    assert table.loc[128, "waits_us"] > 2 * table.loc[33, "waits_us"] > 0  # at 128 rows experts are products
    assert rank_table(rows_frame(round_rows(1.0, 1.0, gpus=1)), collective_rows()).empty


def test_recorded_rounds_are_told_again_with_the_comparison(tmp_path, capsys):
    write_rows(rows_frame(round_rows(15_000.0, 9000.0)), tmp_path / "rounds.parquet")
    write_rows(collective_rows(), tmp_path / "all-reduce.parquet")
    line = ["bench", "round", "--read", str(tmp_path / "rounds.parquet")]
    assert main([*line, "--collectives", str(tmp_path / "all-reduce.parquet")]) == 0
    printed = capsys.readouterr().out
    assert "difference" in printed
    assert "+3.2%" in printed
    assert main([*line, "--collectives", str(tmp_path / "none.parquet")]) == 2


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="needs a machine of fewer than two GPUs")
@pytest.mark.parametrize("verb", ["round", "collectives"])
def test_more_gpus_than_there_are_are_refused_before_anything_starts(verb, capsys):
    assert main(["bench", verb, "--gpus", "2"]) == 2
    assert f"bench {verb}: needs 2 GPUs, this machine has" in capsys.readouterr().err
    assert main(["bench", "collectives", "--gpus", "1"]) == 2
    assert "--gpus: expected at least 2, got 1" in capsys.readouterr().err


def test_the_first_points_of_several_gpus_are_those_that_are_compared():
    chosen = rank_points()
    assert len({point for point, _ in chosen}) == len(chosen)
    assert not any(with_stages for _, with_stages in chosen)
    assert [(point.streams, point.rows) for point, _ in chosen[:8]] == [(s, n) for s in (1, 8) for n in (1, 9, 33, 65)]
    assert np.max([point.context for point, _ in chosen]) == 8192
