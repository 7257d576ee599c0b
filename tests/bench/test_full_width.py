"""Full-width rounds: planned routing touches what it should, and random weights keep activations finite."""

import itertools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from kdlab.bench import write_rows
from kdlab.bench.full_width import suite
from kdlab.bench.full_width.point import NoRoom, Point
from kdlab.bench.full_width.routing import planned_ids
from kdlab.bench.full_width.suite import ROWS, bench_round, points, slice_points
from kdlab.bench.full_width.table import goal_of, jumps, point_table, stage_table, verdict_lines
from kdlab.cli import main
from kdlab.errors import ArgumentError, UnsupportedDevice
from kdlab.model.ranks import Ranks
from tests.bench.samples import made_up_rows
from tests.bench.test_parts import ALONE, assert_parts_are_less_than_their_stages


@pytest.mark.parametrize(("tokens", "distinct"), [(1, 8), (4, 31), (33, 192), (65, 286), (128, 384), (7, 8), (3, 9)])
def test_planned_rows_touch_as_many_experts_as_planned(tokens, distinct):
    ids = planned_ids(tokens, distinct, 384, 8, seed=1)
    assert (ids.shape, ids.dtype) == ((tokens, 8), np.int32)
    assert len(np.unique(ids)) == distinct
    assert all(len(set(row)) == 8 for row in ids.tolist())
    uses = np.bincount(ids.ravel(), minlength=384)
    assert uses.max() - uses[uses > 0].min() <= 1


def test_plans_of_other_seeds_differ():
    assert (planned_ids(8, 40, 384, 8, seed=1) != planned_ids(8, 40, 384, 8, seed=2)).any()


@pytest.mark.parametrize("distinct", [7, 9, 385])
def test_impossible_plans_are_refused(distinct):
    with pytest.raises(ArgumentError, match="distinct"):
        planned_ids(1, distinct, 384, 8, seed=0)


def test_whole_experts_make_the_first_rank_the_busiest():
    ids = planned_ids(8, 59, 384, 8, seed=3, held=(48, 11))
    assert len(np.unique(ids)) == 59
    assert len(np.unique(ids[ids < 48])) == 11
    with pytest.raises(ArgumentError, match="held"):
        planned_ids(8, 59, 384, 8, seed=3, held=(48, 49))


def test_every_row_count_is_measured_with_its_stages_and_each_point_once():
    chosen = points()
    assert len({point for point, _ in chosen}) == len(chosen)
    assert {point.rows for point, with_stages in chosen if with_stages and point.streams == 1} == set(ROWS)
    assert {point.streams for point, _ in chosen} == {1, 4, 8, 16, 32}
    several = {(point.rows, point.streams, point.context) for point, staged in chosen if staged and point.streams > 1}
    short = {one for one in several if one[2] == 1024}
    assert short == {(rows, streams, 1024) for rows in (1, 8, 17, 33, 65) for streams in (4, 8, 16, 32)}
    long = {(rows, streams, context) for rows in (8, 17) for streams in (8, 16) for context in (8192, 32768)}
    assert several - short == long, "attention's tiles"


def test_what_is_cut_when_time_runs_out_is_what_tells_least():
    order = list(dict.fromkeys((point.streams, point.context, point.g) for point, _ in points()))
    assert order[:2] == [(1, 1024, 0.8), (1, 8192, 0.8)]
    assert order[2:8] == [*((streams, 1024, 0.8) for streams in (8, 4, 16, 32)), (8, 8192, 0.8), (16, 8192, 0.8)]
    assert order[8:12] == [(1, 1024, 1.0), (1, 32768, 0.8), (4, 8192, 0.8), (32, 8192, 0.8)]
    assert order[12:16] == [(streams, 32768, 0.8) for streams in (4, 8, 16, 32)]
    assert all(g == 1.0 and (streams == 1 or context < 32768) for streams, context, g in order[16:])
    (first, telling), (second, whole), (third, others) = slice_points()
    judged = {point for point, staged in points() if staged and goal_of(point.rows, point.context) > 0.0}
    assert judged <= {point for point, _ in telling}
    assert len(judged) == 46
    assert (first, second, third) == ("tp", "ep", "tp")
    assert [*telling, *others] == points()
    assert {point.rows for point, _ in whole if point.streams == 1} == set(ROWS)
    assert {(point.streams, point.context, point.g) for point, _ in whole} == {(s, 1024, 0.8) for s in (1, 8, 32)}
    by_stage = {(point.rows, point.streams) for point, with_stages in whole if with_stages}
    assert by_stage == {(1, 1), (9, 1), (33, 1), (65, 1), (33, 8), (65, 32)}


class FakePair(SimpleNamespace):
    """A class of one's own can be referred to weakly."""


class FakeRounds:
    """Stands for the models and the clock of `bench_round`: a point takes a second, a pair ten."""

    def __init__(self, monkeypatch):
        self.now, self.done, self.pairs = 0.0, [], []
        fakes = {
            "require_gpu": lambda what: None,
            "measure_ceilings": dict,
            "gpu_state": lambda device: {},
            "state_columns": lambda before, after: {},
            "run_provenance": lambda **known: known,
            "k26_pair": self.make_pair,
            "measure": self.measure,
            "_rows": lambda pair, found, *others: made_up_rows({1: 1.0}).to_dict("records"),
            "rows_frame": list,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(suite, name, fake)
        monkeypatch.setattr(suite.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(suite.torch.cuda, "current_device", lambda: 0)

    def make_pair(self, ranks, layers, device):
        assert not self.pairs or self.pairs[-1]() is None, "there is no room for two"
        self.now += 10.0
        target = SimpleNamespace(config=None)
        pair = FakePair(ranks=ranks, target=target, drafter=None, dtype=None, target_sha256="", drafter_sha256="")
        self.pairs.append(weakref.ref(pair))
        return pair

    def measure(self, pair, point, stages):
        self.now += 1.0
        if point.rows == 128:
            raise UnsupportedDevice("no room\nat all")
        self.done.append((pair.ranks.experts, point, stages))
        return pair


def test_one_slice_is_timed_with_both_splits_and_what_has_no_room_is_said(monkeypatch):
    fake, seen = FakeRounds(monkeypatch), []
    found = bench_round(progress=lambda done, total: seen.append((done, total)))
    assert len(fake.pairs) == 3
    assert len(seen) == sum(len(wanted) for _, wanted in slice_points())
    assert seen[-1] == (194, 194)
    assert len(found.messages) == sum(point.rows == 128 for _, wanted in slice_points() for point, _ in wanted)
    assert "rows=128" in found.messages[0]
    assert found.messages[0].endswith("left out, no room")
    assert [experts for experts, point, _ in fake.done if point == Point(33, 1, 1024, 0.8)] == ["tp", "ep"]


@pytest.mark.parametrize(("seconds", "pairs", "left"), [(15.5, 1, 188), (75.5, 1, 128), (76.5, 2, 128), (87.5, 2, 126)])
def test_no_point_begins_when_the_time_is_over(monkeypatch, seconds, pairs, left):
    fake = FakeRounds(monkeypatch)
    found = bench_round(seconds=seconds)
    assert len(fake.pairs) == pairs
    assert found.messages[-1] == f"out of time: {left} of 194 points left out, the least telling ones"


def test_rows_so_far_are_kept_now_and_then(monkeypatch):
    FakeRounds(monkeypatch)
    kept = []
    bench_round(seconds=45.5, keep=lambda rows: kept.append(len(rows)))
    each = len(made_up_rows({1: 1.0}))
    done = [rows // each for rows in kept]
    assert len(done) == 4
    assert all(8 <= later - before <= 11 for before, later in itertools.pairwise(done)), "a point takes a second"


def test_a_round_that_does_not_fit_ends_several_ranks_but_what_none_has_room_for_is_left_out(monkeypatch):
    FakeRounds(monkeypatch)
    several, chosen = Ranks(0, 2, group=object()), [(Point(128, 1, 64, 0.8), False)]
    monkeypatch.setattr(Ranks, "largest", lambda self, values: values)
    with pytest.raises(UnsupportedDevice, match="no room"):
        bench_round(ranks=2, running=several, chosen=chosen)

    def no_room(pair, point, stages):
        raise NoRoom("on another rank")

    monkeypatch.setattr(suite, "measure", no_room)
    assert "left out, on another rank" in bench_round(ranks=2, running=several, chosen=chosen).messages[0]


def test_a_split_that_is_asked_for_has_all_points(monkeypatch):
    fake, chosen = FakeRounds(monkeypatch), [(Point(9, 1, 64, 0.8), True)]
    bench_round(experts="ep", seconds=1000.0)
    assert {experts for experts, _, _ in fake.done} == {"ep"}
    assert len(fake.done) == sum(point.rows < 128 for point, _ in points())
    fake.done.clear()
    bench_round(chosen=chosen, seconds=1000.0)
    assert fake.done == [("tp", *chosen[0]), ("ep", *chosen[0])]


def test_running_ranks_refuse_another_split(monkeypatch):
    FakeRounds(monkeypatch)
    with pytest.raises(ArgumentError, match="experts: expected 'tp', as the running ranks split"):
        bench_round(experts="ep", running=Ranks.slice_of(0, 8, "tp"))


@pytest.mark.gpu
@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_two_layers_of_one_rank_are_measured_whole_and_by_stage(experts):
    chosen = [(Point(1, 1, 64, 1.0), True), (Point(9, 2, 64, 0.8), True)]
    found = bench_round(ranks=8, experts=experts, layers=2, chosen=chosen)
    assert found.messages == ()
    rows = found.rows
    assert set(rows["metric"]) == {"round", "floor", "loop", "row", "collectives", *ALONE}
    for _, point in rows.groupby("rows"):
        median, least = (point.set_index("metric")[name] for name in ("value", "p10"))
        whole = median["round"]
        # The quickest samples: other tests that share the GPU for a while double the others.
        assert 0.7 * least["round"] < least["stage"].sum() < 1.6 * least["round"]
        assert median["floor"] < whole
        assert whole < 1.5 * median["row"]
        assert median["loop"] > 0.0  # no more is sure of a GPU that other tests share
    assert_parts_are_less_than_their_stages(rows, num_points=2)
    named = rows.loc[(rows["metric"] == "stage") & (rows["rows"] == 9), "case"].str.extract('"stage": "([^"]+)"')[0]
    assert {"experts", "attention", "tree_build", "draft_topk", "commit", "lm_head", "other"} <= set(named)


def test_goals_are_judged_by_the_sum_of_stages_over_the_sum_of_floors():
    table = point_table(made_up_rows({1: 159.0, 8: 146.0, 33: 134.0, 6: 100.0})).set_index("rows")
    assert table.loc[[1, 8, 33], "met"].tolist() == [1.0, 0.0, 1.0]
    assert table.loc[6, "goal"] != table.loc[6, "goal"]
    assert table["gap"].tolist() == pytest.approx([0.01] * 4)
    lines = verdict_lines(table.reset_index())
    assert lines[0] == "stages over floors: 2 of 3 goals met"
    assert table["unrested"].tolist() == pytest.approx([0.03] * 4)
    unrested = "; without rests the GPU itself takes +3.0% to +3.0%"
    assert lines[2] == "host: it adds at most 2% to 4 of 4 rounds, 1.0% to the worst" + unrested
    late = table.assign(gap=table["gap"].where(table["us"] < 150.0, 0.05)).reset_index()
    assert verdict_lines(late)[2] == "host: it adds at most 2% to 3 of 4 rounds, 5.0% to the worst" + unrested


def test_loops_alone_do_not_tell_what_the_host_adds():
    rows = made_up_rows({1: 159.0})
    points = point_table(rows[rows["metric"] != "row"])
    assert points["gap"].isna().all()
    assert verdict_lines(points)[2] == "host: not told, launches in a row were not timed"


def test_a_jump_that_the_floor_does_not_have_is_found():
    found = jumps(point_table(made_up_rows({1: 10.0, 8: 100.0, 9: 125.0, 16: 130.0})))
    assert found[["rows", "next_rows"]].values.tolist() == [[8, 9]]
    assert jumps(point_table(made_up_rows({8: 100.0, 9: 109.0}))).empty


@pytest.mark.parametrize(("nine", "listed"), [(125.0, True), (109.0, False)])
def test_jumps_are_listed_with_the_points(nine, listed, tmp_path, capsys):
    known = {"gpu": "G9", "started_utc": "2026-01-02T03:04:05", "commit": "0123456789"}
    write_rows(made_up_rows({8: 100.0, 9: nine}).assign(**known), tmp_path / "rounds.parquet")
    assert main(["bench", "round", "--read", str(tmp_path / "rounds.parquet")]) == 0
    printed = capsys.readouterr().out
    assert ("next_rows" in printed) == listed
    assert f"neighbouring row counts: {int(listed)} jumps" in printed
    assert "\nshared expert  experts" in printed.partition("parts of stages by themselves")[2]
    assert printed.endswith("\nmeasured on G9, 2026-01-02, commit 0123456\n")


def test_stages_without_a_floor_are_all_loss():
    table = stage_table(made_up_rows({8: 200.0})).set_index("stage")
    assert table["over_us"].to_dict() == pytest.approx({"experts": 40.0, "other": 60.0})
