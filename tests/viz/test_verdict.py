"""The one verdict: both checks must agree, against one control, on enough prompts."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from kdlab.errors import ArgumentError
from kdlab.viz import live_margin, verdict


def live_of(tree, **controls):
    """Tokens per second of the tree and of controls named like `chain_4`, prompt by prompt."""
    columns = {("ddtree", 15.0): tree}
    for name, values in controls.items():
        method, setting = name.rsplit("_", 1)
        columns[method, float(setting)] = values
    frame = pd.DataFrame(columns)
    frame.columns = pd.MultiIndex.from_tuples(frame.columns, names=["method", "setting"])
    return frame


@pytest.fixture
def gain(best):
    return replace(best, budget=15, control_method="chain", control_setting=4.0, margin=0.1, margin_low=0.05,
                   margin_high=0.15, interpolated=False, num_prompts=8)  # fmt: skip


CHAIN = np.array([100.0, 90.0, 110.0, 95.0, 105.0, 100.0, 98.0, 102.0])
NOISE = np.array([0.02, -0.01, 0.0, 0.03, -0.02, 0.01, 0.0, -0.01])


def test_both_above_zero_are_a_gain_and_both_below_a_loss(gain):
    said = verdict(gain, live_of(CHAIN * (1.1 + NOISE), chain_4=CHAIN))
    assert said.startswith("**A gain on this device.**")
    assert "budget 15 +10 % over chain, length 4 (95 % interval over 8 prompts +5.0 to +15 %" in said
    assert "faster on 8 of them" in said
    assert "not decoded live" not in said
    loss = replace(gain, margin=-0.1, margin_low=-0.15, margin_high=-0.05)
    assert verdict(loss, live_of(CHAIN * (0.9 + NOISE), chain_4=CHAIN)).startswith("**A loss on this device.**")


def test_disagreement_or_a_wide_live_interval_is_too_close_to_call(gain):
    other = verdict(gain, live_of(CHAIN * (0.9 + NOISE), chain_4=CHAIN))
    assert other.startswith("**Too close to call on this device.**")
    assert "different signs" in other
    wide = verdict(gain, live_of(CHAIN * (1.002 + NOISE), chain_4=CHAIN))
    assert wide.startswith("**Too close to call")
    assert "interval includes zero" in wide
    for said in (other, wide):
        assert not any(word in said.lower() for word in ("a gain", "a loss"))


def test_the_control_is_the_quotients_or_the_nearest_of_its_method(gain):
    live = live_of(CHAIN * 1.1, chain_3=CHAIN * 0.9, chain_5=CHAIN, chain_1=CHAIN * 2, ar_0=CHAIN * 3)
    found = live_margin(gain, live)
    assert found.control == ("chain", 5.0)
    assert not found.same_control
    assert found.margin == pytest.approx(0.1)
    assert "over chain, length 5 (that control was not decoded live" in verdict(gain, live)
    adaptive = replace(gain, control_method="adaptive_chain", control_setting=0.3)
    assert live_margin(adaptive, live).control == ("ar", 0.0)
    assert "fastest control" in verdict(adaptive, live)
    exact = live_margin(replace(gain, control_setting=1.0), live)
    assert (exact.control, exact.same_control) == (("chain", 1.0), True)


def test_the_live_margin_is_the_geometric_mean_with_an_interval_around_it(gain):
    found = live_margin(gain, live_of(CHAIN * (1.1 + NOISE), chain_4=CHAIN))
    assert found.margin == pytest.approx(np.exp(np.log(1.1 + NOISE).mean()) - 1.0)
    assert found.low < found.margin < found.high
    assert found.by_prompt.tolist() == pytest.approx((0.1 + NOISE).tolist())


@pytest.mark.parametrize("num_prompts", [1, 3, 4])
def test_few_prompts_give_numbers_and_no_verdict(gain, num_prompts):
    said = verdict(gain, live_of(CHAIN * 1.1, chain_4=CHAIN).head(num_prompts))
    assert said.startswith(f"**No verdict from {num_prompts} prompt")
    assert f"Live decodes: {', '.join(['+10 %'] * num_prompts)} against chain, length 4." in said
    assert "nan" not in said


def test_prompts_decoded_by_one_arm_alone_do_not_count(gain):
    live = live_of(CHAIN * 1.1, chain_4=CHAIN)
    live.iloc[:5, 0] = np.nan
    assert len(live_margin(gain, live).by_prompt) == 3
    live.iloc[:, 0] = np.nan
    with pytest.raises(ArgumentError, match="decoded by"):
        live_margin(gain, live)


def test_simulated_halves_get_no_verdict(gain):
    said = verdict(replace(gain, simulated=True), live_of(CHAIN * 1.1, chain_4=CHAIN))
    assert said.startswith("**No verdict.**")
    assert "simulated" in said


def test_decodes_without_the_budget_or_any_control_are_refused(gain):
    with pytest.raises(ArgumentError, match="budget 15"):
        verdict(gain, live_of(CHAIN, chain_4=CHAIN).drop(columns="ddtree", level="method"))
    with pytest.raises(ArgumentError, match="AR or a chain"):
        verdict(gain, live_of(CHAIN))
