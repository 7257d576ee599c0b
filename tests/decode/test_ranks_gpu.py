"""Ranks on GPUs: every slice with the CUDA ops on one GPU, and several GPUs over NCCL, captured with their sums."""

import time
from types import SimpleNamespace

import pytest
import torch

import kdlab
from kdlab.decode.decoding import start
from kdlab.errors import ArgumentError
from kdlab.model.ranks import Ranks
from kdlab.model.target import plan_target
from kdlab.paths import bundled_pair
from tests.decode.test_gpu import NEAR_TIE_MARGIN, NEAR_TIE_SHARE, SAMPLED, compiled, gpu_pair, margins, prompts
from tests.decode.test_ranks import CASES as TREES
from tests.decode.test_ranks import NUM_TOKENS, PATIENCE_S, calls_of_a_round, expected_calls, lose_rank_1
from tests.pairs import golden_prompts
from tests.rank_processes import run_ranks, values_of
from tests.thread_ranks import on_thread_ranks

pytestmark = pytest.mark.gpu
compiled = compiled  # the fixture: ops are compiled side by side, once
OPTIONS = dict(budget=16, max_new_tokens=32)
TOP_P = SAMPLED | {"top_p": 0.9}
COUNTED = ("tree", "tree at 0.8, top-p")
CASES = [
    ("tiny", "float32", "tp", 2, {}),
    ("tiny", "float32", "ep", 2, TOP_P),
    ("bundled", "bfloat16", "tp", 4, {}),
    ("bundled", "bfloat16", "ep", 2, SAMPLED),
    ("bundled", "bfloat16", "ep", 4, {}),
    ("bundled", "bfloat16", "tp", 2, SAMPLED),
]


def assert_as_one_rank(run, name, dtype, sampling):
    """Every token is the best of one rank's plain decoding, or near it; `wrong` ones are not. With top-p: it is its."""
    pair, limit = gpu_pair(name, dtype), NEAR_TIE_MARGIN[name] if dtype == "bfloat16" else 1e-3
    if "top_p" in sampling:  # which has no table of scores to compare with
        alone = kdlab.generate(pair, prompts(name), streams=3, graph="off", **OPTIONS, **sampling)
        assert run.output_ids == alone.output_ids
        return
    below, _ = margins(pair, run, **sampling)
    wrong, _ = margins(pair, run, chosen=lambda ids: ids[1:] + ids[:1], **sampling)
    assert (wrong > limit).double().mean() > 0.9
    assert below.max() <= limit
    assert (below > 0).double().mean() < NEAR_TIE_SHARE


@pytest.mark.parametrize(("name", "dtype", "experts", "size", "sampling"), CASES, ids=str)
def test_slices_on_one_gpu_decode_together(name, dtype, experts, size, sampling):
    def work(pair):
        return kdlab.generate(pair, prompts(name), streams=3, graph="off", **OPTIONS, **sampling)

    place = dict(name=name, device="cuda", dtype=getattr(torch, dtype))
    runs = on_thread_ranks(size, experts, work, **place)
    assert all(run.output_ids == runs[0].output_ids for run in runs)
    assert all(run.round_lengths == runs[0].round_lengths for run in runs)
    assert_as_one_rank(runs[0], name, dtype, sampling)


def test_inner_widths_that_the_op_cannot_run_are_refused_before_weights_are_read():
    directory, _ = bundled_pair("tiny")
    plan = plan_target(directory, device="cuda", dtype=torch.float32, ranks=Ranks.slice_of(0, 4))
    with pytest.raises(ArgumentError, match="moe_intermediate_size = 64 in units of 32, got 4"):
        plan.read("cuda")


def on_gpus(rank, size, name, dtype, experts, sampling):
    pair = kdlab.load_pair(name, ranks=size, experts=experts, device="cuda", dtype=dtype)
    runs = [kdlab.generate(pair, prompts(name), graph=graph, **OPTIONS, **sampling) for graph in ("on", "off")]
    cases = COUNTED if name == "tiny" else ()
    calls = {case: (calls_of_a_round(pair, case), calls_of_a_capture(pair, case)) for case in cases}
    pair.ranks.close()
    return [(run.prompt_ids, run.output_ids, run.provenance["graph"]) for run in runs], calls


def calls_of_a_capture(pair, case):
    """The collectives of one run of a round that is captured: it runs twice, before the capture and in it."""
    engine = start(pair, golden_prompts()[:2], max_new_tokens=NUM_TOKENS, graph="on", **TREES[case])
    pair.ranks.calls.clear()
    engine.round.capture()
    return {kind: number / 2 for kind, number in pair.ranks.calls.items()}


def needs_gpus(size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")


@pytest.mark.parametrize(("name", "dtype", "experts", "size", "sampling"), CASES, ids=str)
def test_captured_rounds_over_nccl_are_those_of_one_rank(name, dtype, experts, size, sampling, tmp_path):
    needs_gpus(size)
    found = values_of(run_ranks(size, on_gpus, size, name, dtype, experts, sampling, folder=tmp_path))
    assert all(value[0] == found[0][0] for value in found)
    for prompt_ids, output_ids, _ in found[0][0]:
        assert_as_one_rank(SimpleNamespace(prompt_ids=prompt_ids, output_ids=output_ids), name, dtype, sampling)
        assert output_ids == found[0][0][0][1] or dtype == "bfloat16"
    assert [graph for *_, graph in found[0][0]] == ["graph", "eager"]
    for case, calls in found[0][1].items():
        assert calls == (expected_calls(case), expected_calls(case))


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_lost_rank_ends_the_others_over_nccl(how, graph, tmp_path):
    """Also where the others wait for it inside a captured collective, which nothing but the end of a process ends."""
    needs_gpus(2)
    began = time.monotonic()
    other, lost = run_ranks(2, lose_rank_1, how, "cuda", graph, folder=tmp_path)
    assert lost.exitcode != 0
    assert other.exitcode == 1, other.said
    assert f"rank 1 gave no sign of life for {PATIENCE_S:g} s" in other.said
    assert time.monotonic() - began < 60
