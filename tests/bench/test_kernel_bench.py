"""The kernel benchmark: wrong arms refused, time shared out, floors and goals in the rows; on a GPU a short run."""

import dataclasses
import json
import time

import pandas as pd
import pytest
import torch

from kdlab.bench import read_rows, write_rows
from kdlab.bench.kernels import (
    HEADS,
    OPS,
    bench_kernels,
    case_text,
    compare_runs,
    kernel_table,
    representative_cases,
    runner,
    verdict_lines,
    with_other_modes,
)
from kdlab.bench.kernels.case import Arm, Case, relative_error, wrong_share
from kdlab.bench.kernels.goals import goal_us, mma_goal_us
from kdlab.bench.kernels.measured import WARM
from kdlab.bench.timing import WARM_ROTATIONS, Pass
from kdlab.cli import main
from kdlab.errors import ArgumentError, UnsupportedDevice
from kdlab.kernels.cost import Cost
from tests.bench.samples import CEILINGS, kernel_rows


def make_case(arms, **options):
    sizes = {"streams": 1, "rows": 3, "prefix": 256, "heads": 64}
    return Case("verify_attention", sizes, lambda seed: {"x": torch.full((2, 4), seed + 1.0)}, arms,
                lambda inputs: Cost(8_000_000), 1000, **options)  # fmt: skip


def double(inputs):
    return 2 * inputs["x"]


def arm(run, **options):
    return Arm(run, lambda inputs, out: relative_error(out, 2 * inputs["x"].double()), 1e-3, **options)


def fails(error):
    def run(inputs):
        raise error

    return run


def arms_of(run):
    """Names and modes of what was timed."""
    return [(row["impl"], row["graph"]) for row in run.rows if row["metric"] == "time_us"]


@pytest.fixture
def no_gpu(monkeypatch):
    """Runs the runner without a GPU: a pass takes 10 us, and every round of samples advances no clock."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(runner, "rotations", lambda size: 3)
    monkeypatch.setattr(runner, "make_pass", lambda calls, graph: Pass([call() for call in calls], len(calls)))
    monkeypatch.setattr(runner, "sample", lambda passes, seconds: {name: [10.0, 12.0] for name in passes})


def test_right_arms_are_timed_and_wrong_or_failing_ones_are_named(no_gpu):
    run = runner._Run(time.monotonic() + 60)
    arms = {
        "good": arm(double),
        "wrong": arm(lambda inputs: 2.1 * inputs["x"]),
        "nan": arm(lambda inputs: torch.nan * inputs["x"]),
        "absent": arm(fails(ImportError("no such package\nmore"))),
        "elsewhere": arm(fails(UnsupportedDevice("for sm_90a alone"))),
        "prepared": arm(double, prepare=lambda inputs: {"x": inputs["x"].clone()}),
    }
    case = make_case(arms)
    runner._check(run, case)
    assert run.barred == {("verify_attention", name) for name in ("wrong", "nan", "absent", "elsewhere")}
    text = "\n".join(run.messages)
    assert "verify_attention, wrong: WRONG, not timed: error 0.05 above 0.001" in text
    assert "verify_attention, nan: WRONG, not timed: error inf" in text
    assert "verify_attention, absent: cannot run: no such package\n" in text
    assert "for sm_90a alone" in text
    errors = {row["impl"]: row["value"] for row in run.rows}
    assert errors == {"good": 0.0, "wrong": pytest.approx(0.05), "nan": 1e30, "prepared": 0.0}
    costs = runner._time_cases(run, [case], None)
    modes = ("graph", "graph, warm cache", "eager")
    assert arms_of(run) == [(name, mode) for mode in modes for name in ("good", "prepared")]
    assert costs == [(case, Cost(8_000_000))]
    assert CEILINGS.floor_us(Cost(8_000_000)) == pytest.approx(2.0)
    assert CEILINGS.floor_us(Cost(1)) == pytest.approx(1.05), "not less than an empty kernel"


def test_an_error_of_the_program_is_no_missing_peer(no_gpu):
    with pytest.raises(KeyError):
        runner._check(runner._Run(time.monotonic()), make_case({"bad": arm(lambda inputs: inputs["y"])}))


def test_an_arm_that_no_graph_holds_is_timed_eager_alone(no_gpu):
    run = runner._Run(time.monotonic() + 60)
    runner._time_cases(run, [make_case({"host": arm(double, graph=False), "cuda": arm(double)})], None)
    assert arms_of(run) == [("cuda", "graph"), ("cuda", WARM), ("host", "eager"), ("cuda", "eager")]


def test_what_is_warm_anyway_is_not_timed_warm_again(no_gpu, monkeypatch):
    monkeypatch.setattr(runner, "rotations", lambda size: WARM_ROTATIONS)
    run = runner._Run(time.monotonic() + 60)
    runner._time_cases(run, [make_case({"cuda": arm(double)})], None)
    assert arms_of(run) == [("cuda", "graph"), ("cuda", "eager")]


def test_an_arm_that_cannot_be_captured_leaves_the_others(no_gpu, monkeypatch):
    def make_pass(calls, graph):
        if graph and calls[0]() is None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Pass(calls[0], 1)

    monkeypatch.setattr(runner, "make_pass", make_pass)
    run = runner._Run(time.monotonic() + 60)
    runner._time_cases(run, [make_case({"syncs": arm(lambda inputs: None), "cuda": arm(double)})], None)
    assert arms_of(run) == [("cuda", "graph"), ("cuda", WARM), ("syncs", "eager"), ("cuda", "eager")]
    assert "syncs: cannot run (graph): operation not permitted" in "".join(run.messages)


def test_out_of_time_is_said_with_the_first_case_that_was_cut(no_gpu):
    run = runner._Run(time.monotonic() - 1.0)
    assert runner._time_cases(run, [make_case({"cuda": arm(double)})] * 3, None) == []
    assert list(run.messages) == [
        "out of time: 3 cases left out, from verify_attention streams=1 rows=3 prefix=256 heads=64"
    ]


def test_a_case_that_does_not_fit_the_card_leaves_the_others(no_gpu, monkeypatch):
    def too_large(seed):
        raise torch.OutOfMemoryError("80 GiB")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    run, good = runner._Run(time.monotonic() + 60), make_case({"cuda": arm(double)})
    costs = runner._time_cases(run, [dataclasses.replace(good, make=too_large), good], None)
    assert [case for case, _ in costs] == [good]
    assert "left out, its buffers do not fit" in "".join(run.messages)


def test_every_case_gets_its_share_of_what_is_left(no_gpu, monkeypatch):
    given, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def sample(passes, seconds):
        given.append(seconds)
        now[0] += 1.0
        return {name: [1.0] for name in passes}

    monkeypatch.setattr(runner, "sample", sample)
    run = runner._Run(deadline=10.0)
    done = []
    runner._time_cases(run, [make_case({"cuda": arm(double)})] * 8, lambda *progress: done.append(progress))
    assert given[0] == pytest.approx(0.65 * (10.0 / 8 - 0.1))
    assert done == [(number, 8) for number in range(1, 5)]
    assert "out of time: 4 cases left out" in "".join(run.messages)


@pytest.mark.parametrize(
    ("out", "exact", "error"),
    [
        ([[3.0, 4.0]], [[3.0, 4.0]], 0.0),
        ([[3.0, 4.5]], [[3.0, 4.0]], 0.1),
        ([[3.0, 4.0], [0.0, 1.0]], [[3.0, 4.0], [0.0, 2.0]], 0.5),
        ([[0.0, 0.0]], [[0.0, 0.0]], 0.0),
        ([[0.0, 1e-9]], [[0.0, 0.0]], float("inf")),
        ([[float("nan"), 0.0]], [[1.0, 0.0]], float("inf")),
    ],
)
def test_the_error_is_that_of_the_worst_row(out, exact, error):
    assert relative_error(torch.tensor(out), torch.tensor(exact).double()) == pytest.approx(error)


def test_integers_are_counted_and_shapes_compared():
    assert wrong_share(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert wrong_share(torch.tensor([1]), torch.tensor([1, 1])) == 1.0
    with pytest.raises(ValueError, match="shape"):
        relative_error(torch.ones(1, 2), torch.ones(2, 2).double())


def no_times(op, sizes, impl):
    return None


@pytest.mark.parametrize(
    ("op", "sizes", "floor", "goal"),
    [
        ("draft_topk", {"streams": 1, "k": 64}, 1.2, 8.0),
        ("draft_topk", {"streams": 8, "k": 64}, 9.6, 19.2),
        ("draft_topk", {"streams": 1, "k": 8}, 1.2, None),
        ("tree_build", {"streams": 1, "budget": 256}, 0.1, 15.0),
        ("tree_build", {"streams": 1, "budget": 512}, 0.1, None),
        ("tree_build", {"streams": 8, "budget": 256}, 0.1, None),
        ("verify_attention", {}, 20.0, None),
        ("target_sample", {}, 3.0, 6.0),
        ("target_sample", {}, 0.1, 2.12),
        ("tree_accept", {"streams": 8, "rows": 64}, 0.1, 2.5),
        ("tree_accept", {"streams": 1, "rows": 64}, 0.1, None),
        ("kv_commit", {"streams": 1, "moved": 8, "tap_width": 0}, 0.3, 5.0),
        ("kv_commit", {"streams": 8, "moved": 8, "tap_width": 0}, 0.3, None),
        ("moe_int4", {}, 75.0, 100.0),
        ("norm_rope", {}, 1.0, None),
    ],
)
def test_goals_are_those_of_the_design(op, sizes, floor, goal):
    cost = Cost(round(4_140_000 * floor))
    assert goal_us(op, sizes, cost, no_times) == (goal if goal is None else pytest.approx(goal))


def test_goals_that_stand_on_other_times():
    times = {("verify_attention", "flashmla prefix"): 100.0, ("tree_build", "cuda"): 10.0}

    def medians(op, sizes, impl):
        assert sizes.get("streams", 1) == 1
        return times[op, impl]

    short, long = Cost(0, 40 * 785_000_000), Cost(0, 80 * 785_000_000)
    assert goal_us("verify_attention", {"streams": 1}, short, medians) == pytest.approx(75.0)
    assert goal_us("verify_attention", {"streams": 1}, long, medians) == pytest.approx(80.0 / 0.83 + 4.0)
    assert goal_us("tree_build", {"streams": 8, "budget": 512}, Cost(1), medians) == pytest.approx(11.0)


def test_the_portable_kernel_is_held_against_mma_sync_alone():
    sizes = {"streams": 8, "rows": 33, "prefix": 4096, "heads": 64}
    assert mma_goal_us("verify_attention", sizes, 600_000_000, 1e12) == pytest.approx(1000.0)
    assert mma_goal_us("verify_attention", sizes | {"rows": 9}, 600_000_000, 1e12) is None
    assert mma_goal_us("moe_int4", sizes, 600_000_000, 1e12) is None


def test_rows_become_one_table_and_go_through_a_file(tmp_path):
    write_rows(kernel_rows(), tmp_path / "rows.parquet")
    table = kernel_table(read_rows(tmp_path / "rows.parquet"))
    line = table[(table["op"] == "verify_attention") & (table["impl"] == "wgmma") & (table["prefix"] == 4096)].iloc[0]
    assert line["case"] == "S=1 N=33 prefix=4096 H=64"
    assert (line["us"], line["floor_us"], line["own"], line["mode"]) == (40.0, 24.0, True, "graph")
    assert line["roofline"] == pytest.approx(0.6)
    assert line["goal_us"] == pytest.approx(max(0.75 * 50.0, 24.0 * 4.0 / 4.14 / 0.83 + 4.0))
    assert line["verdict"] == "missed"
    peers = table[table["impl"] == "flashmla prefix"]
    assert not peers["own"].any()
    assert peers["verdict"].isna().all()
    assert table.loc[table["mode"] != "graph", "verdict"].isna().all()


def test_the_printed_table_has_one_line_an_arm():
    wide = with_other_modes(kernel_table(kernel_rows())).set_index(["op", "case", "impl"])
    assert not wide.index.duplicated().any()
    arm = wide.loc["verify_attention", "S=1 N=33 prefix=4096 H=64", "wgmma"]
    assert (arm["mode"], arm["us"], arm["eager_us"], arm["warm_us"]) == ("graph", 40.0, 70.0, 38.0)
    host = wide.loc["tree_build", "S=1 B=64 L=15 K=64 peaked", "host heap"]
    assert (host["mode"], host["us"], host["eager_us"]) == ("eager", 730.0, 730.0)
    assert pd.isna(host["warm_us"])


def test_verdicts_count_what_is_met_and_name_what_is_missed():
    lines = verdict_lines(kernel_table(kernel_rows()))
    assert lines[0] == "7 of 8 goals met"
    assert lines[1:] == [
        "missed by 7%: verify_attention S=1 N=33 prefix=4096 H=64, wgmma: 40.0 us, goal 37.5, floor 24.0"
    ]


def test_a_table_is_of_one_run():
    rows = kernel_rows()
    with pytest.raises(ArgumentError, match="no kernel times"):
        kernel_table(rows[rows["op"] == "ceiling"])
    both = pd.concat([rows, rows.assign(run_id="another")])
    with pytest.raises(ArgumentError, match="2 runs"):
        kernel_table(both)


def test_the_overview_has_one_case_an_op():
    table = kernel_table(kernel_rows())
    chosen = representative_cases(table).drop_duplicates(["op", "case"]).set_index("op")["case"].to_dict()
    assert chosen["verify_attention"] == "S=1 N=33 prefix=4096 H=64"
    assert chosen["tree_build"] == "S=1 B=64 L=15 K=64 peaked"
    assert list(chosen) == list(dict.fromkeys(table["op"]))


def test_two_runs_are_compared_time_by_time(tmp_path, capsys):
    first, second = kernel_rows(), kernel_rows()
    moved = (second["impl"] == "mma") & (second["context"] == 4096) & (second["graph"] == "graph")
    second.loc[moved, ["value", "median"]] *= 1.2
    apart = compare_runs(first, second)
    assert len(apart) == len(kernel_table(first).query("mode == 'graph'"))
    assert apart["difference"].iloc[0] == pytest.approx(0.2)
    assert (apart["difference"].iloc[1:] == 0.0).all()
    with pytest.raises(ArgumentError, match="same GPU"):
        compare_runs(first, second.assign(gpu="another"))
    write_rows(first, tmp_path / "a")
    write_rows(second, tmp_path / "b")
    assert main(["bench", "compare", f"{tmp_path}/a", f"{tmp_path}/a"]) == 0
    assert "20 of 20 times agree within 5%" in capsys.readouterr().out
    assert main(["bench", "compare", f"{tmp_path}/a", f"{tmp_path}/b"]) == 1
    assert "mma" in capsys.readouterr().out
    assert main(["bench", "compare", f"{tmp_path}/a", f"{tmp_path}/b", "--tolerance", "0.3"]) == 0


def test_sizes_in_words():
    sizes = {"heads": 64, "prefix": 4096, "rows": 33, "streams": 8}
    assert case_text({"streams": 1, "budget": 64, "draft": "peaked"}) == "S=1 B=64 peaked"
    assert case_text({"rows": 1, "temperature": 1.0, "top_p": 1.0}) == "N=1 T=1"
    assert case_text({"rows": 33, "shared": True, "tap_width": 0, "temperature": 0.5}) == "N=33 shared T=0.5"
    assert json.loads(kernel_rows()["case"].iloc[0]).keys() <= sizes.keys() | {"of", "what"}


@pytest.mark.parametrize(
    ("options", "name"),
    [({"ops": ["sort"]}, "ops"), ({"ops": []}, "ops"), ({"ops": "moe_int4"}, "ops"), ({"heads": [7]}, "heads"),
     ({"seconds": 0.0}, "seconds"), ({"seconds": True}, "seconds")],
)  # fmt: skip
def test_bad_choices_are_refused_before_a_gpu_is_asked_for(options, name):
    with pytest.raises(ArgumentError, match=f"^{name}"):
        bench_kernels(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys):
    assert main(["bench", "kernels"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_short_run_checks_and_times_every_op():
    begin = time.monotonic()
    found = bench_kernels(seconds=25.0)
    assert time.monotonic() - begin < 30.0
    table = kernel_table(found.rows)
    assert set(table["op"]) == set(OPS)
    assert set(table["heads"].dropna()) == set(HEADS)
    assert not [line for line in found.messages if "WRONG" in line]
    own = table[table["own"] & (table["mode"] == "graph")]
    assert (own["roofline"] < 1.05).all(), "faster than the card can be: what is timed is in a cache"
