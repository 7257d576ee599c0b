"""Fitted rounds: made-up times are found again, and another GPU scales what it has to scale."""

import numpy as np
import pytest

from kdlab.errors import ArgumentError
from kdlab.study.experts import distinct_experts
from kdlab.study.gpus import GPUS, MEASURED_H200, carried_over
from kdlab.study.step_cost import Stage, Step, all_reduces, round_stages
from kdlab.study.step_fit import ALL_REDUCE_US, StageTime, fit_stages, fit_table, round_time
from tests.study.k26 import DRAFTER, EXPERTS, TARGET


def step(rows, **changes):
    return Step(rows, distinct_experts(rows, **EXPERTS), ranks=8, **changes)


def stages(rows):
    return round_stages(TARGET, DRAFTER, step(rows))


def made_up(stage: Stage, slope=1.3, launch_us=2.0) -> float:
    rates = {"bytes_per_s": MEASURED_H200.bytes_per_s, "flops_per_s": MEASURED_H200.flops_per_s}
    return slope * stage.cost.floor_us(**rates) + launch_us * stage.launches


def points(noise=0.0):
    draw = np.random.default_rng(1)
    found = [stage for rows in (1, 8, 33, 65, 128) for stage in stages(rows)]
    return [StageTime(stage, made_up(stage) * (1 + noise * draw.normal())) for stage in found]


def test_made_up_times_are_found_again():
    fits = fit_stages(points())
    for name in ("experts", "attention", "q_a and kv_a", "lm_head"):
        assert max(np.abs(fits[name].residuals)) < 1e-6
    assert fits["experts"].slope == pytest.approx(1.3)
    assert fits["experts"].launch_us == pytest.approx(2.0, rel=1e-3)


def test_residuals_show_a_model_that_does_not_fit():
    table = fit_table(fit_stages(points(noise=0.2))).set_index("stage")
    assert 0.02 < table.loc["experts", "residual_median"] < 0.3
    assert (table["points"] == 5).all()


def test_a_round_is_its_stages_and_its_collectives():
    fits = fit_stages(points())
    found = round_time(fits, TARGET, DRAFTER, step(33), MEASURED_H200)
    assert not found.predicted
    assert sum(found.stages.values()) == pytest.approx(sum(made_up(stage) for stage in stages(33)), rel=1e-3)
    calls, moved = all_reduces(TARGET, DRAFTER, step(33))
    assert found.collectives_us == pytest.approx(ALL_REDUCE_US * calls + 1e6 * 1.75 * moved / 4.5e11)
    assert found.us == pytest.approx(sum(found.stages.values()) + found.collectives_us)


def test_other_gpus_scale_bytes_and_operations_and_are_predictions():
    fits = fit_stages(points())
    rounds = {name: round_time(fits, TARGET, DRAFTER, step(33), carried_over(name)) for name in GPUS}
    assert all(found.predicted for found in rounds.values())
    same = round_time(fits, TARGET, DRAFTER, step(33), MEASURED_H200)
    assert rounds["H200"].us == pytest.approx(same.us, rel=1e-6)
    experts = {name: found.stages["experts"] - 2.0 * 60 for name, found in rounds.items()}
    assert experts["H100"] / experts["B200"] == pytest.approx(8.0 / 3.35, rel=1e-3)
    assert rounds["B200"].us < rounds["H200"].us < rounds["H100"].us < rounds["RTX PRO 6000"].us


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: fit_stages([]), "points"),
        (lambda: fit_stages([StageTime(stages(1)[0], 0.0)]), "us"),
        (lambda: fit_stages([StageTime(stages(1)[0], float("nan"))]), "us"),
        (lambda: round_time({}, TARGET, None, step(1), MEASURED_H200), "fits"),
        (lambda: carried_over("A100"), "gpu"),
    ],
)
def test_wrong_arguments_are_named(call, name):
    with pytest.raises(ArgumentError, match=name):
        call()
