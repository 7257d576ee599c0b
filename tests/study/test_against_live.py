"""A recording walked offline equals live decoding, round by round, and the golden rounds."""

from functools import cache

import numpy as np
import pandas as pd
import pytest

import kdlab
from kdlab.bench import Arm, cost_table, time_rounds
from kdlab.study import (
    best_budget,
    speed,
    summarize,
    sweep,
    sweep_ar,
    sweep_beam,
    sweep_chains,
)
from tests.pairs import golden_prompts, golden_rounds, tiny_pair

LIVE_PROMPTS = 2
SETTINGS = {
    "greedy": {},
    "short": {"max_new_tokens": 17},
    "stop": {"stop_token_ids": [ord(".")]},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 5, "max_new_tokens": 48},
}


@cache
def recorded(setting: str = "greedy", num_prompts: int | None = LIVE_PROMPTS, top_k: int = 128):
    return kdlab.record(tiny_pair(), golden_prompts()[:num_prompts], top_k=top_k, **SETTINGS[setting])


def live(setting: str, method: str, budget: int, **options):
    return kdlab.generate(
        tiny_pair(), golden_prompts()[:LIVE_PROMPTS], method=method, budget=budget, **SETTINGS[setting], **options
    )


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("budget", [0, 3, 12, 40, 200])
def test_sweep_equals_live_rounds(setting, budget):
    run = live(setting, "ddtree", budget)
    field = recorded(setting)
    assert [prompt.output_ids.tolist() for prompt in field.prompts] == run.output_ids
    assert sweep(field, [budget])["round_lengths"].tolist() == run.round_lengths


@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_chains_equal_live_rounds(length):
    run = live("greedy", "chain", length)
    assert sweep_chains(recorded(), [length])["round_lengths"].tolist() == run.round_lengths


@pytest.mark.parametrize(("width", "budget"), [(2, 9), (3, 21)])
def test_beams_equal_live_rounds(width, budget):
    run = live("greedy", "beam", budget, width=width)
    assert sweep_beam(recorded(), [width], budget)["round_lengths"].tolist() == run.round_lengths


def test_a_truncated_budget_equals_a_live_decoder_of_the_same_top_k():
    table = sweep(recorded(top_k=4), [24], truncated=True)
    assert table["round_lengths"].tolist() == live("greedy", "ddtree", 24, top_k=4).round_lengths
    assert table["truncated"].all()


def test_a_walk_at_the_wrong_budget_differs():
    """A broken twin: off by one budget must not pass."""
    wrong = [sweep(recorded(), [budget + 1])["round_lengths"].tolist() for budget in (1, 3, 7)]
    right = [sweep(recorded(), [budget])["round_lengths"].tolist() for budget in (1, 3, 7)]
    assert wrong != right


def test_the_golden_acceptance_lengths_of_every_budget_and_the_chain():
    field = recorded(num_prompts=None)
    for prompt, case in zip(field.prompts, golden_rounds(), strict=True):
        golden = {run["budget"]: run["acceptance_lengths"] for run in case["runs"]}
        table = sweep(field, list(golden))
        table = table[table["prompt"] == prompt.prompt].set_index("budget")
        assert table["round_lengths"].to_dict() == golden
        chain = sweep_chains(field, [7])["round_lengths"].tolist()[prompt.prompt]
        assert chain == case["chain"]["acceptance_lengths"]


def test_timed_rounds_and_the_recording_give_speeds():
    prompts = golden_prompts()
    arms = [Arm("ar"), Arm("chain", 7), Arm("ddtree", 7)]
    rows = time_rounds(tiny_pair(), prompts, arms, max_new_tokens=12)
    field = kdlab.record(tiny_pair(), prompts, top_k=128, max_new_tokens=12)
    cost = cost_table(rows)
    tables = [sweep(field, [7]), sweep_ar(field), sweep_chains(field, [7])]
    table = pd.concat(tables, ignore_index=True)
    speeds = speed(summarize(table, num_resamples=20), cost)
    assert (speeds["cost_source"] == "measured").all()
    assert np.isfinite(speeds["tok_s"]).all()
    assert best_budget(table, cost, num_resamples=20).budget == 7
