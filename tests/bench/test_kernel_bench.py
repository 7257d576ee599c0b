"""The kernel benchmark: wrong arms refused, time shared out, floors and goals in the rows; a run that is cut."""

import dataclasses
import json
import re
import time

import pytest
import torch

from kdlab.bench.kernels import (
    OPS,
    bench_kernels,
    kernel_table,
    runner,
)
from kdlab.bench.kernels.case import Arm, Case, relative_error
from kdlab.bench.kernels.measured import WARM
from kdlab.bench.kernels.suite import HEADS, cases_of, in_turns
from kdlab.bench.timing import Pass
from kdlab.cli import main
from kdlab.errors import ArgumentError, KdlabError, UnsupportedDevice
from kdlab.kernels import jit
from kdlab.kernels.cost import Cost
from tests.bench.samples import CEILINGS
from tests.golden.make_parquet_v1 import PROVENANCE


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
    monkeypatch.setattr(runner, "stays_in_cache", lambda size: False)
    monkeypatch.setattr(runner, "make_pass", lambda calls, graph: Pass([call() for call in calls], len(calls), calls))
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


def test_a_fault_of_the_device_in_a_check_is_one_sentence(no_gpu, monkeypatch):
    def broken():
        raise RuntimeError("an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(KdlabError, match=r"failed at the check of verify_attention .*, bad: an illegal memory access"):
        runner._check(runner._Run(time.monotonic()), make_case({"bad": arm(fails(RuntimeError("x")))}))


def test_an_error_of_the_program_is_no_missing_peer(no_gpu):
    with pytest.raises(KeyError):
        runner._check(runner._Run(time.monotonic()), make_case({"bad": arm(lambda inputs: inputs["y"])}))


def test_an_arm_that_no_graph_holds_is_timed_eager_alone(no_gpu):
    run = runner._Run(time.monotonic() + 60)
    runner._time_cases(run, [make_case({"host": arm(double, graph=False), "cuda": arm(double)})], None)
    assert arms_of(run) == [("cuda", "graph"), ("cuda", WARM), ("host", "eager"), ("cuda", "eager")]


def test_eager_calls_are_those_of_an_eager_round(no_gpu, monkeypatch):
    found = {}

    def note(inputs):
        found[len(found)] = torch.is_inference_mode_enabled(), jit._block.token is not None

    monkeypatch.setattr(runner, "make_pass", lambda calls, graph: Pass(calls[0], 1, calls))
    monkeypatch.setattr(runner, "sample", lambda passes, _: {name: [one.run() or 1.0] for name, one in passes.items()})
    runner._time_cases(runner._Run(time.monotonic() + 60), [make_case({"cuda": arm(note)})], None)
    assert list(found.values()) == [(False, False), (False, False), (True, True)]  # graph, warm, eager


def test_what_is_warm_anyway_is_not_timed_warm_again(no_gpu, monkeypatch):
    monkeypatch.setattr(runner, "stays_in_cache", lambda size: True)
    run = runner._Run(time.monotonic() + 60)
    runner._time_cases(run, [make_case({"cuda": arm(double)})], None)
    assert arms_of(run) == [("cuda", "graph"), ("cuda", "eager")]
    assert {row["note"] for row in run.rows} == {"inputs in the L2 cache"}


def test_an_arm_that_cannot_be_captured_leaves_the_others(no_gpu, monkeypatch):
    def make_pass(calls, graph):
        if graph and calls[0]() is None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Pass(calls[0], 1, calls)

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
        "; nothing is timed of verify_attention"
    ]


def ops_cut(messages):
    """Ops that a run's messages name as having no time at all."""
    found = re.search(r"nothing is timed of ([\w, ]+)", "\n".join(messages))
    return set(found[1].split(", ")) if found else set()


@pytest.mark.parametrize(("seconds", "num_timed"), [(0.0, 0), (10.0, 4), (1000.0, len(OPS))])
def test_every_op_is_timed_or_named_as_cut(no_gpu, monkeypatch, seconds, num_timed):
    now = [0.0]

    def sample(passes, seconds):
        now[0] += 1.0
        return {name: [1.0] for name in passes}

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(runner, "sample", sample)
    case, run = make_case({"cuda": arm(double)}), runner._Run(deadline=seconds)
    runner._time_cases(run, in_turns([[dataclasses.replace(case, op=op)] * 2 for op in OPS]), None)
    timed = {row["op"] for row in run.rows}
    assert len(timed) == num_timed
    assert ops_cut(run.messages) == set(OPS) - timed


def test_a_case_that_does_not_fit_the_card_leaves_the_others(no_gpu, monkeypatch):
    def too_large(seed):
        raise torch.OutOfMemoryError("80 GiB")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    run, good = runner._Run(time.monotonic() + 60), make_case({"cuda": arm(double)})
    costs = runner._time_cases(run, [dataclasses.replace(good, make=too_large), good], None)
    assert [case for case, _ in costs] == [good]
    assert "left out, its buffers do not fit" in "".join(run.messages)


def test_a_fault_of_the_device_ends_the_run_names_its_case_and_keeps_what_was_timed(no_gpu, monkeypatch):
    good = make_case({"cuda": arm(double)})

    def make(seed):
        raise RuntimeError("an illegal memory access was encountered\nmore")

    run = runner._Run(time.monotonic() + 60)
    costs = runner._time_cases(run, [good, dataclasses.replace(good, make=make), good], None)
    assert [case for case, _ in costs] == [good]
    assert run.fault == f"case 2 of 3, {good.name}: an illegal memory access was encountered"
    assert {row["metric"] for row in run.rows} == {"time_us"}


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
    ("options", "name"),
    [({"ops": ["sort"]}, "ops"), ({"ops": []}, "ops"), ({"ops": "moe_int4"}, "ops"), ({"heads": [7]}, "heads"),
     ({"seconds": 0.0}, "seconds"), ({"seconds": True}, "seconds")],
)  # fmt: skip
def test_bad_choices_are_refused_before_a_gpu_is_asked_for(options, name):
    with pytest.raises(ArgumentError, match=f"^{name}"):
        bench_kernels(**options)


@pytest.fixture
def made_up_card(no_gpu, monkeypatch):
    """A card whose name is `card["gpu"]`, two cases an op, one of them for long runs alone, and a wrong peer."""
    card = {"gpu": "NVIDIA H200"}
    wrong = arm(lambda inputs: 3 * inputs["x"], own=False)
    arms = {"cuda": arm(double, goal=True), "wrong": wrong, "slow": arm(double, short=False)}
    case = make_case(arms)
    cases = [case, dataclasses.replace(case, sizes={**case.sizes, "rows": 65}, default=False)]
    monkeypatch.setattr(runner, "require_gpu", lambda what: None)
    monkeypatch.setattr(runner, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(runner, "compile_all", lambda jobs, workers: {})
    monkeypatch.setattr(runner, "measure_ceilings", lambda: CEILINGS)
    monkeypatch.setattr(runner, "run_provenance", lambda **fields: PROVENANCE | fields | card)
    monkeypatch.setattr(runner, "cases_of", lambda op, heads: cases)
    monkeypatch.setattr(runner, "checks_of", lambda op, heads: [case])
    return card


def test_a_short_run_from_end_to_end(made_up_card):
    found = bench_kernels(ops=["verify_attention"])
    table = kernel_table(found.rows)
    assert (table["rows"] == 3).all()
    assert set(table["impl"]) == {"cuda"}
    text = "\n".join(found.messages)
    assert "wrong: WRONG, not timed" in text
    assert "short run: 1 of 2 cases; without warm caches, nor at large sizes: verify_attention, slow" in text
    assert set(table["mode"]) == {"graph", "eager"}
    assert re.search(r"1 cases in 0\.\d s: 0\.\d s until all is compiled, 0\.\d s until all is checked", text)
    assert table["floor_us"].iloc[0] == pytest.approx(2.0)


def test_ops_and_heads_take_turns_so_that_a_cut_leaves_something_of_each():
    lists = [["a1", "a2", "a3"], ["b1"], ["c1", "c2"]]
    assert in_turns(lists) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_a_long_run_has_every_case_and_goals_are_judged_on_their_card_alone(made_up_card):
    found = bench_kernels(seconds=300.0, ops=["moe_int4"])
    table = kernel_table(found.rows)
    assert set(table["rows"]) == {3, 65}
    assert set(table["impl"]) == {"cuda", "slow"}
    assert set(table["mode"]) == {"graph", WARM, "eager"}
    assert "short run" not in "".join(found.messages)
    made_up_card["gpu"] = "NVIDIA RTX"
    other = bench_kernels(ops=["moe_int4"])
    assert "none is judged on NVIDIA RTX" in "".join(other.messages)
    assert "goal_us" not in set(other.rows["metric"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys):
    assert main(["bench", "kernels"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


GPU_OPS = {"verify_attention": pytest.mark.gpu}  # its arms depend on the card


@pytest.mark.parametrize("op", [pytest.param(op, marks=GPU_OPS.get(op, ())) for op in OPS])
def test_no_case_is_timed_twice(op):
    cases = cases_of(op, HEADS)
    assert len({json.dumps(dict(case.sizes), sort_keys=True) for case in cases}) == len(cases)
    assert {case.name for case in cases_of(op, HEADS[1:])} <= {case.name for case in cases}
