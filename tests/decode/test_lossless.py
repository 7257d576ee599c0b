"""Every method writes what AR writes: greedy, and token for token with the same seed at temperature."""

from functools import cache

import pytest
import torch

import kdlab
from kdlab.kernels.reference import target_sample
from kdlab.model.cache import LatentCache
from kdlab.paths import DATA
from tests.decode.ar_oracle import Oracle
from tests.pairs import golden_prompts, tiny_pair

METHODS = {
    "ar": dict(method="ar"),
    "chain": dict(method="chain"),
    "chain of 3": dict(method="chain", budget=3),
    "tree of 1": dict(method="ddtree", budget=1),
    "tree of 7": dict(method="ddtree", budget=7),
    "tree of 40": dict(method="ddtree", budget=40),
    "tree of 24 from the top 2": dict(method="ddtree", budget=24, top_k=2),
    "beam of 3": dict(method="beam", width=3),
    "beam of 6, best 20": dict(method="beam", width=6, budget=20),
}
SAMPLING = [(0.0, 1.0, 0), (0.6, 0.95, 3), (1.0, 1.0, 0), (1.0, 0.9, 2**40 + 1)]
NUM_TOKENS = 40


@cache
def oracle_tokens(temperature, top_p, seed):
    oracle = Oracle(DATA / "tiny-pair" / "target")
    sampling = dict(temperature=temperature, top_p=top_p, seed=seed)
    encode = tiny_pair().tokenizer.encode
    return [
        oracle.decode(encode(text), NUM_TOKENS, stream=i, **sampling) for i, text in enumerate(golden_prompts())
    ]


@pytest.mark.parametrize(("temperature", "top_p", "seed"), SAMPLING)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_the_oracles_tokens(method, temperature, top_p, seed):
    run = kdlab.generate(
        tiny_pair(),
        golden_prompts(),
        max_new_tokens=NUM_TOKENS,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        **METHODS[method],
    )
    assert run.output_ids == oracle_tokens(temperature, top_p, seed)


def test_seeds_differ_and_repeat():
    def decode(seed):
        return kdlab.generate(tiny_pair(), golden_prompts(), max_new_tokens=24, temperature=1.0, seed=seed).output_ids

    assert decode(5) == decode(5)
    assert decode(5) != decode(6)


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_streams_of_different_lengths_do_not_disturb_each_other(streams):
    prompts = ["the ", *golden_prompts(), "the robot sees the farmer at the park. 5+5=10; " * 3]
    options = dict(max_new_tokens=30, temperature=1.0, seed=11, budget=12)
    together = kdlab.generate(tiny_pair(), prompts, **options)
    batched = kdlab.generate(tiny_pair(), prompts, streams=streams, **options)
    assert batched.output_ids == together.output_ids
    assert batched.round_lengths == together.round_lengths
    fewer = kdlab.generate(tiny_pair(), prompts[:2], **options)
    assert fewer.output_ids == together.output_ids[:2]


def spine_length(tree):
    """Nodes of the draft's top path that the tree holds."""
    row, length = 0, 0
    while True:
        child = next((i for i in range(1, tree.capacity) if tree.parent[0, i] == row and tree.rank[0, i] == 0), None)
        if child is None:
            return length
        row, length = child, length + 1


def test_a_tree_with_the_whole_chain_in_it_never_accepts_less_than_the_chain():
    chain = kdlab.generate(tiny_pair(), golden_prompts(), method="chain")
    tree = kdlab.generate(tiny_pair(), golden_prompts(), budget=64)
    num_compared = 0
    for chain_rounds, tree_rounds in zip(chain.rounds, tree.rounds, strict=True):
        by_anchor = {record.anchor_position: record for record in chain_rounds}
        for record in tree_rounds:
            chained = by_anchor.get(record.anchor_position)
            if chained is not None and spine_length(record.tree) == 7:
                num_compared += 1
                assert record.num_tokens >= chained.num_tokens
    assert num_compared >= 5


def test_one_candidate_a_depth_is_the_chain():
    chain = kdlab.generate(tiny_pair(), golden_prompts(), method="chain")
    thin = kdlab.generate(tiny_pair(), golden_prompts(), budget=7, top_k=1)
    assert thin.output_ids == chain.output_ids
    assert thin.round_lengths == chain.round_lengths


NEAR_TIE_MARGIN = 0.5  # logits; bf16 keeps 8 bits and the tiny target's logits reach 20


@pytest.mark.parametrize("method", ["chain", "tree of 40"])
def test_bf16_output_follows_the_near_tie_rule(method):
    pair = tiny_pair("bfloat16")
    run = kdlab.generate(pair, golden_prompts(), max_new_tokens=64, **METHODS[method])
    for prompt_ids, output_ids in zip(run.prompt_ids, run.output_ids, strict=True):
        logits = teacher_forced(pair, prompt_ids + output_ids)[len(prompt_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output_ids)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() <= NEAR_TIE_MARGIN
        broken = torch.tensor(output_ids).roll(1)[:, None]
        assert (logits.amax(1) - logits.gather(1, broken)[:, 0]).max() > NEAR_TIE_MARGIN


def teacher_forced(pair, ids):
    """Logits [T, V] float32 of a text, one token a call as in AR decoding."""
    cache, rows = LatentCache.allocate(pair.target.config, 1, len(ids) + 1, pair.dtype, pair.device), []
    for position, token in enumerate(ids):
        start = torch.tensor([position])
        one = torch.ones(1, 1, 1, dtype=torch.bool)
        rows.append(pair.target.head(pair.target(torch.tensor([[token]]), start[:, None], cache, start, one).hidden))
    return torch.cat(rows)[:, 0].float()


def test_target_sample_matches_the_scalar_oracle():
    from tests.decode.ar_oracle import draw

    logits = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0)) * 3
    stream, position = torch.tensor([0, 4, 9]), torch.arange(15).view(3, 5) * 7
    for temperature, top_p in [(0.0, 1.0), (0.3, 0.5), (1.0, 0.9), (1.5, 1.0), (1.0, 1e-9)]:
        got = target_sample(logits, temperature=temperature, top_p=top_p, seed=77, stream=stream, position=position)
        want = [[draw(logits[s, n], temperature, top_p, 77, int(stream[s]), int(position[s, n])) for n in range(5)]
                for s in range(3)]  # fmt: skip
        assert got.tolist() == want
