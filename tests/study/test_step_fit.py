"""Fitted rounds: made-up times are found again, other GPUs scale what they have to scale, and runs are not mixed."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from kdlab.errors import ArgumentError, ComparisonError
from kdlab.study.collectives import (
    ALL_REDUCE_US,
    LARGE_BYTES,
    MODELLED,
    collectives_us,
    experts_are_products,
    fit_all_reduce,
    fit_waits,
    with_waits,
)
from kdlab.study.gpus import GPUS, MEASURED_H200, carried_over
from kdlab.study.recorded_rounds import StageTime, read_rounds
from kdlab.study.step_cost import LAUNCH_US, all_reduces, round_stages
from kdlab.study.step_fit import (
    WHOLE,
    Correction,
    fit_rounds,
    fit_stages,
    fit_table,
    fitted_points,
    floor_fit,
    round_time,
)  # fmt: skip
from tests.study import rounds
from tests.study.k26 import DRAFTER, TARGET

FIT = fit_rounds(read_rounds(rounds.round_rows(), TARGET, DRAFTER))
STEP = rounds.step_of(33, 1, 1024, 0.8)


def test_made_up_rounds_are_found_again():
    for name in ("experts", "attention", "q_a and kv_a", "lm_head"):
        assert max(np.abs(FIT.stages[name].residuals)) < 1e-6
    experts = FIT.stages["experts"]
    found = (experts.slope, experts.rest, experts.launch_us)
    assert found == pytest.approx((rounds.SLOPE, rounds.REST, rounds.LAUNCH_US), rel=1e-3)
    assert (FIT.scale, FIT.extra_us) == pytest.approx((rounds.SCALE, rounds.EXTRA_US), rel=1e-3)
    assert FIT.measured


def test_rounds_that_were_not_timed_by_stage_test_the_fit():
    rows = rounds.round_rows()
    wrong = rows.assign(value=np.where(rows["case"].str.contains('"g": 1.0'), 1.2 * rows["value"], rows["value"]))
    recorded = read_rounds(wrong, TARGET, DRAFTER)
    points = fitted_points(recorded, fit_rounds(recorded))
    wholes = points[points["stage"] == WHOLE]
    assert (wholes.loc[wholes["g"] == 1.0, "residual"] < -0.05).all()
    assert (wholes.loc[wholes["g"] < 1.0, "residual"] > 0.05).all()


def test_what_whole_rounds_are_off_by_is_put_right_by_their_rows():
    rows = rounds.round_rows()
    slow = (rows["metric"] == "round") & (rows["rows"] == 8)
    recorded = read_rounds(rows.assign(value=np.where(slow, 1.3 * rows["value"], rows["value"])), TARGET, DRAFTER)
    fit = fit_rounds(recorded)
    assert max(np.abs(fit.residuals)) > 0.1
    assert fit.error < 0.01
    for one in recorded.wholes:
        n, streams, context, g = one.key[:4]
        found = round_time(fit, TARGET, DRAFTER if n > 1 else None, rounds.step_of(n, streams, context, g)).whole_us
        assert found == pytest.approx(one.us, rel=0.02)


def test_a_correction_is_the_median_and_linear_in_the_logarithm_between_rows():
    found = Correction.of([(2, 1.0), (8, 1.2), (8, 1.4), (8, 9.0)])
    assert (found.rows, found.factors) == ((2, 8), (1.0, 1.4))
    assert found.at(4) == pytest.approx(1.2)
    assert (found.at(1), found.at(99)) == (1.0, 1.4)
    assert Correction((), ()).at(5) == 1.0


def test_a_round_is_checked_by_rounds_of_other_shapes_not_by_its_own_with_another_routing():
    rows = rounds.round_rows()
    slow = (rows["metric"] == "round") & (rows["rows"] * rows["streams"] == 65 * 4) & (rows["context"] == 8192)
    rows = rows.assign(value=np.where(slow, 1.5 * rows["value"], rows["value"]))
    fit = fit_rounds(read_rounds(rows, TARGET, DRAFTER))
    assert sum(abs(off) > 0.2 for off in fit.checked) >= slow.sum() == 2
    assert fit.most_rows == 260


def test_attention_of_few_tiles_is_cut_into_parts_whose_price_is_found():
    for n, streams, parts in ((1, 1, 129), (64, 1, 16), (8, 8, 16), (65, 8, 0)):
        stages = round_stages(TARGET, DRAFTER, rounds.step_of(n, streams, 8192, 0.8))
        assert next(stage.parts for stage in stages if stage.name == "attention") == 61 * parts
    assert FIT.stages["attention"].part_us == pytest.approx(rounds.PART_US, rel=1e-3)
    assert FIT.stages["attention"].rest == 0.0


def test_residuals_show_a_model_that_does_not_fit():
    fit = fit_rounds(read_rounds(rounds.round_rows(noise=0.2), TARGET, DRAFTER))
    table = fit_table(fit).set_index("stage")
    assert 0.02 < table.loc["experts", "residual_median"] < 0.3
    assert table.loc["experts", "points"] == sum(g < 1.0 for *_, g in rounds.POINTS)
    assert table.loc[WHOLE, "points"] == len(rounds.POINTS)


def test_no_kernel_beats_its_bytes_so_that_weights_are_not_taken_for_launches():
    """q_a and kv_a reads the same weights whatever the rows: only the least slope tells them from a launch's price."""
    fit = FIT.stages["q_a and kv_a"]
    assert fit.slope >= 1.0
    stage = next(stage for stage in round_stages(TARGET, DRAFTER, STEP) if stage.name == "q_a and kv_a")
    fast = fit.us(stage, MEASURED_H200) - fit.us(stage, carried_over("B200"))
    moved = stage.cost.bytes * (1 / MEASURED_H200.bytes_per_s - 1 / carried_over("B200").bytes_per_s)
    assert fast >= 1e6 * moved


def test_a_round_is_its_stages_and_its_collectives():
    found = round_time(FIT, TARGET, DRAFTER, STEP)
    assert not found.predicted
    total = sum(map(rounds.made_up_us, round_stages(TARGET, DRAFTER, STEP))) + rounds.made_up_us(rounds.OTHER_STAGE)
    assert found.whole_us == pytest.approx(rounds.SCALE * total + rounds.EXTRA_US, rel=1e-3)
    calls, moved = all_reduces(TARGET, DRAFTER, STEP)
    assert found.collectives_us == pytest.approx(ALL_REDUCE_US * calls + 1e6 * 1.75 * moved / 4.5e11)
    assert found.us == pytest.approx(found.whole_us + found.collectives_us)


def test_without_recorded_rounds_stages_stand_at_their_floors():
    floor = floor_fit(TARGET, DRAFTER)
    found = round_time(floor, TARGET, DRAFTER, STEP)
    rates = {"bytes_per_s": MEASURED_H200.bytes_per_s, "flops_per_s": MEASURED_H200.flops_per_s}
    floors = [stage.floor_us(**rates, launch_us=LAUNCH_US) for stage in round_stages(TARGET, DRAFTER, STEP)]
    assert found.whole_us == pytest.approx(sum(floors))
    assert not floor.measured
    assert found.whole_us < round_time(FIT, TARGET, DRAFTER, STEP).whole_us
    assert fit_table(floor).set_index("stage").loc["experts", "points"] == 0


def test_other_gpus_scale_bytes_and_operations_and_are_predictions():
    times = {name: round_time(FIT, TARGET, DRAFTER, STEP, carried_over(name)) for name in GPUS}
    assert all(found.predicted for found in times.values())
    assert times["H200"].us == pytest.approx(round_time(FIT, TARGET, DRAFTER, STEP).us, rel=1e-6)
    experts = {name: found.stages["experts"] - rounds.LAUNCH_US * 60 for name, found in times.items()}
    assert experts["H100"] / experts["RTX PRO 6000"] == pytest.approx(1.792 / 3.35, rel=0.02)
    assert times["B200"].us < times["H200"].us < times["H100"].us < times["RTX PRO 6000"].us
    assert times["RTX PRO 6000"].collectives_us > 3 * times["H200"].collectives_us


def test_measured_all_reduces_take_the_place_of_the_modelled_ones():
    measured = fit_all_reduce(rounds.all_reduce_rows())
    assert (measured.base_us, measured.hop_us, measured.ring) == pytest.approx((5.0, 0.5, 1.2), rel=1e-6)
    assert measured.us(8, 0.0) == pytest.approx(5.0 + 14 * 0.5)
    assert measured.source(4) == "measured on 2 and 4 GPUs"
    assert measured.source(8) == "measured on 2 and 4 GPUs, carried on to 8"
    assert MODELLED.source(8).startswith("modelled, 8 µs each")
    step = rounds.step_of(33, 1, 1024, 0.8)
    assert collectives_us(TARGET, DRAFTER, step, all_reduce=measured) > collectives_us(TARGET, DRAFTER, step)
    one = fit_all_reduce(rounds.all_reduce_rows(ranks=(4,)))
    assert one.hop_us == 0.0
    assert one.source(8).startswith("measured on 4 GPUs; 8 are taken to have the same fixed time")
    assert MODELLED.us(1, 1e6) == 0.0


def test_all_reduces_of_many_bytes_take_a_step_more():
    rows = rounds.all_reduce_rows(rows=(1, 9, 65, 264, 520), large_us=8.0)
    stepped = fit_all_reduce(rows)
    assert (stepped.base_us, stepped.ring, stepped.large_us) == pytest.approx((5.0, 1.2, 8.0), rel=1e-6)
    assert max(np.abs(stepped.residuals)) < 1e-6
    small, large = (stepped.us(2, 2 * size, calls=2) for size in (LARGE_BYTES, LARGE_BYTES + 8))
    assert large - small == pytest.approx(16.0, abs=0.01)


def test_rounds_are_put_right_by_those_whose_experts_are_split_alike():
    other = rounds.round_rows(points=rounds.POINTS[:8], experts="ep")
    slow = other[other["metric"] == "round"]
    slow = slow.assign(value=1.3 * slow["value"])
    recorded = read_rounds(pd.concat([rounds.round_rows(), slow], ignore_index=True), TARGET, DRAFTER)
    fit = fit_rounds(recorded)
    for one in recorded.wholes:
        n, streams, context, g = one.key[:4]
        step = rounds.step_of(n, streams, context, g, one.experts)
        found = round_time(fit, TARGET, DRAFTER if n > 1 else None, step).whole_us
        assert found == pytest.approx(one.us, rel=0.05)


def test_what_rounds_wait_for_beside_their_collectives_goes_by_how_their_experts_are_computed():
    measured = fit_all_reduce(rounds.all_reduce_rows())
    few, many = ((67, 1, 1024, 0.8), (79, 1, 1024, 0.8)), ((17, 4, 1024, 0.8), (16, 5, 1024, 0.8))
    recorded = [
        rounds.round_rows(points=points, experts=experts, gpus=2, waits_us=wait_us, all_reduce=measured)
        for points, experts, wait_us in (
            (few[:1], "tp", 3.0),
            (few[1:], "ep", 3.0),
            (many[:1], "tp", 12.0),
            (many[1:], "ep", 12.0),
        )
    ]
    waiting = with_waits(measured, pd.concat(recorded, ignore_index=True), TARGET, DRAFTER)
    assert (waiting.wait_us, waiting.many_wait_us) == pytest.approx((3.0, 12.0))
    for products, wait_us in ((False, 3.0), (True, 12.0)):
        found = waiting.us(8, 1e6, calls=5, products=products)
        assert found == pytest.approx(measured.us(8, 1e6, calls=5) + 5 * wait_us)
    words = "with 3.0 µs each that whole rounds take beside them, 12.0 where experts are products of matrices"
    assert words in waiting.source(8)
    step = rounds.step_of(33, 4, 1024, 0.8)
    calls = all_reduces(TARGET, DRAFTER, step)[0]
    beside = collectives_us(TARGET, DRAFTER, step, all_reduce=waiting)
    assert beside == pytest.approx(collectives_us(TARGET, DRAFTER, step, all_reduce=measured) + 12.0 * calls)
    assert with_waits(waiting, pd.concat(recorded, ignore_index=True), TARGET, DRAFTER) == waiting


@pytest.mark.parametrize(("experts", "first"), [("tp", 68), ("ep", 80)])
def test_from_so_many_rows_on_experts_are_products(experts, first):
    below, at = (rounds.step_of(rows, 1, 1024, 0.8, experts) for rows in (first - 1, first))
    assert not experts_are_products(TARGET, below)
    assert experts_are_products(TARGET, at)
    assert not experts_are_products(replace(TARGET, experts_int4=False), at)


def test_one_wait_stands_for_both_where_rounds_of_one_kind_were_recorded():
    measured = fit_all_reduce(rounds.all_reduce_rows())
    few = rounds.round_rows(points=((33, 1, 1024, 0.8),), gpus=2, waits_us=3.0, all_reduce=measured)
    waiting = with_waits(measured, few, TARGET, DRAFTER)
    assert (waiting.wait_us, waiting.many_wait_us) == pytest.approx((3.0, 3.0))
    assert waiting.source(2).endswith("with 3.0 µs each that whole rounds take beside them")
    for rows in (rounds.round_rows(), few.iloc[:0]):  # rounds of one GPU say nothing of it
        assert with_waits(measured, rows, TARGET, DRAFTER) == measured
    assert fit_waits([90.0, 80.0], [100.0, 100.0], [10, 10], [False, True]) == (0.0, 0.0)


@pytest.mark.parametrize("field", ["gpu", "gpu_uuid", "commit", "torch"])
def test_rounds_of_different_cards_or_code_are_not_mixed(field):
    name = "git_commit" if field == "commit" else field
    other = rounds.round_rows(points=rounds.POINTS[:2], **{name: "another"})
    with pytest.raises(ComparisonError, match=f"^{field}:"):
        read_rounds(pd.concat([rounds.round_rows(), other], ignore_index=True), TARGET, DRAFTER)


def test_all_reduces_of_different_cards_are_not_mixed():
    both = [rounds.all_reduce_rows(), rounds.all_reduce_rows(gpu="another")]
    with pytest.raises(ComparisonError, match="gpu"):
        fit_all_reduce(pd.concat(both, ignore_index=True))


def test_both_ways_of_splitting_experts_are_one_fit():
    other = rounds.round_rows(points=rounds.POINTS[:8], experts="ep")
    whole = other[other["metric"] == "round"]
    fit = fit_rounds(read_rounds(pd.concat([rounds.round_rows(), whole], ignore_index=True), TARGET, DRAFTER))
    assert len(fit.residuals) == len(rounds.POINTS) + 8
    assert max(np.abs(fit.residuals)) < 1e-3
    slow = whole.assign(value=1.3 * whole["value"])
    wrong = fit_rounds(read_rounds(pd.concat([rounds.round_rows(), slow], ignore_index=True), TARGET, DRAFTER))
    assert max(np.abs(wrong.residuals)) > 0.1


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: fit_stages([]), "points"),
        (lambda: fit_stages([StageTime(round_stages(TARGET, None, STEP)[0], 0.0)]), "us"),
        (lambda: fit_stages([StageTime(round_stages(TARGET, None, STEP)[0], float("nan"))]), "us"),
        (lambda: round_time(fit_rounds(read_rounds(rounds.round_rows(points=[(1, 1, 1024, 0.8)]), TARGET, DRAFTER)),
                            TARGET, DRAFTER, STEP), "fit"),
        (lambda: read_rounds(rounds.round_rows(), TARGET, DRAFTER, ranks=4), "rows"),
        (lambda: read_rounds(rounds.round_rows().iloc[:0], TARGET, DRAFTER), "rows"),
        (lambda: read_rounds(rounds.round_rows(points=[(8, 1, 1024, 1.0)]), TARGET, DRAFTER), "rows"),
        (lambda: fit_all_reduce(rounds.round_rows()), "rows"),
        (lambda: carried_over("A100"), "gpu"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, name):
    with pytest.raises(ArgumentError, match=name):
        call()


def test_an_unknown_stage_is_named():
    rows = rounds.round_rows(points=[(8, 1, 1024, 0.8)])
    renamed = rows["case"].str.replace('"stage": "experts"', '"stage": "nonsense"')
    with pytest.raises(ArgumentError, match="'nonsense'"):
        read_rounds(rows.assign(case=renamed), TARGET, DRAFTER)
