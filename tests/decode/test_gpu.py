"""The same decoder on a GPU: golden rounds, the CPU's sampled tokens, the CPU's draft field."""

from functools import cache

import numpy as np
import pytest

import kdlab
from tests.pairs import golden_prompts, golden_rounds, tiny_pair

pytestmark = pytest.mark.gpu


@cache
def gpu_pair(dtype="float32"):
    return kdlab.load_pair("tiny", device="cuda", dtype=dtype)


@pytest.mark.parametrize("budget", [0, 7, 64])
def test_golden_rounds(budget):
    run = kdlab.generate(gpu_pair(), golden_prompts(), budget=budget)
    for i, case in enumerate(golden_rounds()):
        golden = next(entry for entry in case["runs"] if entry["budget"] == budget)
        assert run.output_ids[i] == golden["output_ids"][len(case["prompt_ids"]) :][:96]
        assert run.round_lengths[i] == golden["acceptance_lengths"]
    assert run.provenance["gpu"] is not None


@pytest.mark.parametrize("options", [dict(method="ar"), dict(method="chain"), dict(budget=12)], ids=str)
def test_sampled_tokens_are_those_of_the_cpu(options):
    sampling = dict(max_new_tokens=40, temperature=0.8, top_p=0.95, seed=3)
    on_cpu = kdlab.generate(tiny_pair(), golden_prompts(), method="ar", **sampling)
    assert kdlab.generate(gpu_pair(), golden_prompts(), **options, **sampling).output_ids == on_cpu.output_ids


def test_the_draft_field_is_that_of_the_cpu():
    on_cpu = kdlab.record(tiny_pair(), golden_prompts(), max_new_tokens=32)
    on_gpu = kdlab.record(gpu_pair(), golden_prompts(), max_new_tokens=32)
    for ours, theirs in zip(on_gpu.prompts, on_cpu.prompts, strict=True):
        assert np.array_equal(ours.all_ids, theirs.all_ids)
        assert np.allclose(ours.next_log_prob, theirs.next_log_prob, atol=1e-3)
        assert (ours.token_ids[..., 0] == theirs.token_ids[..., 0]).mean() > 0.99


def test_bf16_rounds_run_and_draft():
    run = kdlab.generate(gpu_pair("bfloat16"), golden_prompts(), budget=16, max_new_tokens=48)
    assert all(len(ids) == 48 for ids in run.output_ids)
    assert np.mean(run.tokens_per_round) > 3
