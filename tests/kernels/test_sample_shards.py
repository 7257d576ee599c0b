"""target_sample over vocabulary shards: the same tokens as unsharded, with little exchanged and padding never read."""

import pytest
import torch

from kdlab.errors import ArgumentError, ShapeError
from kdlab.kernels.sample_shards import choose_token, merge_candidates, target_sample_shard, top_p_mass_shard
from kdlab.kernels.target_sample import target_sample
from tests.kernels.test_target_sample import DEVICES, SAMPLERS, gpu, options, random_logits


def sample_sharded(logits, num_shards, settings, reverse=False):
    """What the ranks do, one after the other; padding columns hold what must not be read."""
    vocab, device = logits.shape[-1], logits.device
    width = -(-vocab // num_shards)
    parts = []
    for rank in range(num_shards):
        first = min(rank * width, vocab)
        own = logits[..., first : first + width]
        padded = torch.full((*logits.shape[:2], width + 8), torch.nan if rank % 2 else 1e4, dtype=logits.dtype)
        padded = padded.to(device)
        padded[..., : own.shape[-1]] = own
        parts.append((padded, {"first_id": first, "num_ids": own.shape[-1]}))
    shards = [target_sample_shard(padded, **columns, **settings) for padded, columns in parts]
    candidates = merge_candidates(shards[::-1] if reverse else shards)
    mass, top_p, temperature = None, settings["top_p"], settings["temperature"]
    if temperature > 0 and top_p < 1:
        masses = [top_p_mass_shard(p, candidates, **columns, temperature=temperature) for p, columns in parts]
        mass = torch.stack(masses).sum(0)
    return choose_token(candidates, mass, top_p=top_p)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_shards", [1, 2, 8])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_shards_draw_the_same_token(sampler, num_shards, device):
    for vocab, dtype in ((41, torch.float32), (1000, torch.bfloat16), (163_840, torch.bfloat16)):
        if device == "cpu" and vocab > 1000:
            continue
        logits = random_logits(2, 12, vocab, device=device, dtype=dtype, seed=num_shards)
        logits[0, 0] = logits[0, 0].round()
        logits[0, 1], logits[0, 2, vocab // 2], logits[1, 3, -1] = -torch.inf, torch.nan, torch.inf
        logits[1, 4, : vocab // 2] = -torch.inf
        settings = options(sampler, 2, 12, device)
        whole = target_sample(logits, **settings)
        for reverse in (False, True):
            assert sample_sharded(logits, num_shards, settings, reverse).tolist() == whole.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_shards_that_forget_their_first_id_are_noticed(device):
    logits = random_logits(1, 30, 1000, device=device)
    settings = options((1.0, 0.9), 1, 30, device)
    halves = [logits[..., :500], logits[..., 500:]]
    shards = [target_sample_shard(half, first_id=0, **settings) for half in halves]
    mass = sum(top_p_mass_shard(half, merge_candidates(shards), first_id=0, temperature=1.0) for half in halves)
    tokens = choose_token(merge_candidates(shards), mass, top_p=0.9)
    assert tokens.tolist() != target_sample(logits, **settings).tolist()


def test_bad_arguments_are_named():
    logits, settings = torch.zeros(1, 2, 16), options((1.0, 0.9), 1, 2, "cpu")
    with pytest.raises(ArgumentError, match="num_ids"):
        target_sample_shard(logits, first_id=0, num_ids=17, **settings)
    with pytest.raises(ArgumentError, match="shards"):
        merge_candidates([])
    shard = target_sample_shard(logits, first_id=0, **settings)
    with pytest.raises(ArgumentError, match="temperature"):
        top_p_mass_shard(logits, shard, first_id=0, temperature=0.0)
    with pytest.raises(ShapeError, match=r"shards\[1\].top"):
        merge_candidates([shard, shard._replace(top=shard.top[:, :1])])


@gpu
def test_candidates_of_another_dtype_are_refused():
    logits, settings = random_logits(1, 2, 600), options((1.0, 0.9), 1, 2)
    shard = target_sample_shard(logits, first_id=0, **settings)
    for wrong in (shard._replace(values=shard.values.double()), shard._replace(token_ids=shard.token_ids[..., :1])):
        with pytest.raises(ShapeError, match="candidates"):
            top_p_mass_shard(logits, wrong, first_id=0, temperature=1.0)


def test_top_p_needs_the_shards_mass():
    logits = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0))
    key = {"seed": 1, "stream": torch.zeros(1, dtype=torch.int64), "position": torch.arange(2)[None]}
    shard = target_sample_shard(logits, temperature=1.0, top_p=0.5, first_id=0, **key)
    candidates = merge_candidates([shard])
    with pytest.raises(ArgumentError, match="mass"):
        choose_token(candidates, top_p=0.5)
    assert choose_token(candidates, top_p=1.0).shape == (1, 2)
