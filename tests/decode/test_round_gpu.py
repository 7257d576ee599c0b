"""Rounds on a GPU: they wait for no host, a captured one is the eager one, and it allocates and disturbs nothing."""

from contextlib import contextmanager

import pytest
import torch

import kdlab
from kdlab.decode import decoding
from kdlab.decode.round import Round
from kdlab.decode.settings import make_settings
from kdlab.errors import KdlabError, NotSupported
from kdlab.model.cache import LatentCache
from tests.decode.rounds import assert_same_rounds
from tests.decode.test_gpu import compiled, gpu_pair, prompts
from tests.pairs import golden_prompts

pytestmark = pytest.mark.gpu
__all__ = ["compiled"]  # a fixture of this module too

METHODS = {
    "ar": dict(method="ar"),
    "chain": dict(method="chain"),
    "chain of 3 from the top 4": dict(method="chain", budget=3, top_k=4),
    "tree of 31": dict(budget=31),
    "tree of 300 from the top 100": dict(budget=300, top_k=100),
}
SAMPLED = dict(temperature=0.8, top_p=0.9, seed=3)
PAIRS = [("tiny", "float32"), ("bundled", "bfloat16")]


@contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def engine(name="bundled", dtype="bfloat16", steps=3, **options):
    """An engine in the middle of three texts."""
    running = decoding.start(gpu_pair(name, dtype), prompts(name), **{"max_new_tokens": 64, "streams": 3} | options)
    for _ in range(steps):
        running.step()
    assert not running.done
    return running


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_a_round_never_waits_for_the_host(name, dtype, method, sampling, graph):
    running = engine(name, dtype, graph=graph, **METHODS[method], **sampling)
    with no_synchronisation():
        running._mailbox.post()
        for _ in range(3):
            running.round.run()


def test_a_tree_that_the_host_builds_is_found_to_wait():
    running = engine(method="beam", width=3)
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        running.round.run()


@pytest.mark.parametrize("options", [dict(method="beam", width=3), dict(budget=300), dict(impl="reference")], ids=str)
def test_what_cannot_be_captured_is_refused_and_auto_leaves_it_eager(options):
    with pytest.raises(NotSupported, match="graph"):
        kdlab.generate(gpu_pair("bundled"), prompts("bundled"), graph="on", **options)
    run = kdlab.generate(gpu_pair("bundled"), prompts("bundled")[:1], max_new_tokens=4, **options)
    assert run.provenance["graph"] == "eager"


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_captured_rounds_are_the_eager_ones(name, dtype, method, sampling):
    options = dict(max_new_tokens=40, streams=2, record_experts=True) | METHODS[method] | sampling
    eager = kdlab.generate(gpu_pair(name, dtype), prompts(name), graph="off", **options)
    captured = kdlab.generate(gpu_pair(name, dtype), prompts(name), **options)
    assert (eager.provenance["graph"], captured.provenance["graph"]) == ("eager", "graph")
    assert_same_rounds(captured, eager)


@pytest.mark.parametrize("impl", ["naive", "mma", "wgmma", "flashmla"])
def test_every_attention_can_be_captured(impl):
    if impl == "flashmla":
        pytest.importorskip("flash_mla")
    options = dict(budget=16, max_new_tokens=24, streams=2, impl=impl)
    eager = kdlab.generate(gpu_pair("bundled", "bfloat16"), prompts("bundled"), graph="off", **options)
    captured = kdlab.generate(gpu_pair("bundled", "bfloat16"), prompts("bundled"), graph="on", **options)
    assert captured.output_ids == eager.output_ids


@pytest.mark.parametrize("streams", [1, 5, 32])
def test_streams_from_1_to_32_with_slots_taken_over(streams):
    texts = [text[: 5 + 3 * i] for i, text in enumerate(golden_prompts() * 9)]
    options = dict(budget=12, max_new_tokens=24, stop_token_ids=[ord("."), ord("=")])
    on_cpu = kdlab.generate(kdlab.load_pair("tiny"), texts, streams=4, **options)
    run = kdlab.generate(gpu_pair(), texts, streams=streams, **options)
    assert run.output_ids == on_cpu.output_ids
    assert run.round_lengths == on_cpu.round_lengths
    assert run.finish == on_cpu.finish


@pytest.mark.parametrize("record_experts", [False, True])
def test_steady_rounds_allocate_nothing(record_experts):
    running = engine(budget=31, record_experts=record_experts, max_new_tokens=200, graph="on")

    def allocations():
        stats = torch.cuda.memory_stats()
        names = ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries")
        return torch.cuda.memory_allocated(), *(stats[name] for name in names)

    before = allocations()
    for _ in range(8):
        running.step()
    assert not running.done
    assert allocations() == before
    running.round._run()  # the eager round does allocate, and is seen to
    assert allocations() != before


def test_capture_writes_nothing_that_lives():
    pair = gpu_pair("bundled", "bfloat16")
    settings = make_settings(pair, 3, budget=31)
    cache = LatentCache.allocate(pair.target.config, 3, 200, pair.dtype, pair.device)
    cache.pages.normal_()
    context = pair.new_context(3, 200)
    context.keys.normal_()
    context.values.normal_()
    pages, keys, values = cache.pages.clone(), context.keys.clone(), context.values.clone()
    captured = Round(pair, settings, cache, context)
    captured.capture()
    captured.run()
    torch.cuda.synchronize()
    assert torch.equal(cache.pages, pages)
    assert torch.equal(context.keys[:, :, :-1], keys[:, :, :-1])  # the last row is the bin
    assert torch.equal(context.values[:, :, :-1], values[:, :, :-1])


def test_replays_after_the_end_change_nothing():
    running = engine(budget=31, graph="on", steps=0)
    decoding.run_all(running)
    captured = running.round
    live = [captured.cache.pages, captured.context.keys[:, :, :-1], captured.streams.start, captured.streams.anchor]
    before = [tensor.clone() for tensor in live]
    for _ in range(3):
        captured.run()
    assert all(torch.equal(tensor, old) for tensor, old in zip(live, before, strict=True))
    assert not captured.streams.running.any()


@pytest.mark.parametrize("graph", ["off", "on"])
def test_target_logits_that_are_not_finite_end_the_decode(graph, monkeypatch):
    pair = gpu_pair("bundled", "bfloat16")
    original = type(pair.target).head

    def head(self, hidden, *_):
        logits = original(self, hidden)
        return logits * torch.nan if hidden.shape[1] == 17 else logits

    monkeypatch.setattr(type(pair.target), "head", head)
    with pytest.raises(KdlabError, match=r"prompt 0, round at position \d+: target logits that are not finite"):
        kdlab.generate(pair, prompts("bundled"), budget=16, graph=graph)


def test_the_draft_field_needs_the_tail_that_the_device_counts():
    on_cpu = kdlab.record(kdlab.load_pair("tiny"), golden_prompts(), max_new_tokens=24, stop_token_ids=[ord(".")])
    on_gpu = kdlab.record(gpu_pair(), golden_prompts(), max_new_tokens=24, stop_token_ids=[ord(".")])
    for ours, theirs in zip(on_gpu.prompts, on_cpu.prompts, strict=True):
        assert ours.all_ids.tolist() == theirs.all_ids.tolist()
        assert ours.num_starts == theirs.num_starts


def test_a_prompt_of_several_chunks_is_prefilled_by_the_same_ops():
    text = ("the cat sees the hill. " * 30)[:600]
    options = dict(budget=12, max_new_tokens=12, stop_token_ids=[])
    run = kdlab.generate(gpu_pair(), [text, "5+40"], **options)
    on_cpu = kdlab.generate(kdlab.load_pair("tiny"), [text, "5+40"], **options)
    assert run.output_ids == on_cpu.output_ids
    assert run.round_lengths == on_cpu.round_lengths
    # Of float32; plain torch alone would be "reference".
    assert run.provenance["impl"] == "draft_attention=reference+verify_attention=reference"
