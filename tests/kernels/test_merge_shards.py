"""merge_shards: what the ranks gathered, merged as plain torch merges it, wherever the ranks' fields lie."""

import pytest
import torch

from kdlab.errors import ArgumentError, ShapeError, UnsupportedDevice
from kdlab.kernels import draft_topk, sample_shards
from kdlab.kernels.draft_topk import TopKShard, draft_topk_shard
from kdlab.kernels.merge_shards import best_candidate, choose_token, merge_candidates, merge_topk
from kdlab.kernels.sample_shards import SampleShard, target_sample_shard, top_p_mass_shard
from tests.kernels.test_target_sample import DEVICES, gpu, options, random_logits

CASES = [(1, 1000, 8), (2, 1000, 64), (8, 4096, 1), (8, 4096, 32), (8, 163_840, 256), (32, 4096, 256)]


def shards_of(logits, num_ranks, work, *, apart=False):
    """Each rank's result of work(columns, first_id), stacked; `apart` leaves room between the ranks, as messages do."""
    width = logits.shape[-1] // num_ranks
    found = [work(logits[..., rank * width : (rank + 1) * width], rank * width) for rank in range(num_ranks)]
    stacked = type(found[0])(*(torch.stack(fields) for fields in zip(*found, strict=True)))
    return type(stacked)(*map(with_gaps, stacked)) if apart else stacked


def with_gaps(field):
    wide = torch.cat([field.flatten(1), torch.ones_like(field.flatten(1))], dim=1)
    return wide[:, : field[0].numel()].unflatten(1, field.shape[1:])


def hard_logits(vocab, device):
    """Rows with ties, with little above -inf, with NaN, +inf and nothing in one shard."""
    logits = random_logits(2, 5, vocab, device=device, dtype=torch.bfloat16)
    logits[0, 0] = logits[0, 0].round()
    logits[0, 1], logits[0, 2, vocab // 2], logits[0, 3, -1] = -torch.inf, torch.nan, torch.inf
    logits[1, 1, : vocab // 2], logits[1, 2] = -torch.inf, 3.0
    return logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_ranks", "vocab", "k"), CASES)
def test_topk_of_all_shards_is_that_of_torch(num_ranks, vocab, k, device):
    if device == "cpu" and vocab > 4096:
        pytest.skip("slow in torch")
    logits = hard_logits(vocab, device)

    def work(part, first):
        return draft_topk_shard(part, k, first_id=first)

    for apart in (False, True):
        shards = shards_of(logits, num_ranks, work, apart=apart)
        got, want = merge_topk(shards), merge_topk(shards, impl="reference")
        whole = draft_topk.draft_topk(logits, k)
        assert torch.equal(got.token_ids, want.token_ids)
        assert torch.equal(got.nonfinite, want.nonfinite)
        assert torch.equal(got.token_ids, whole.token_ids)
        torch.testing.assert_close(got.log_probs, want.log_probs, rtol=1e-6, atol=1e-6, equal_nan=True)
    if num_ranks > 1:
        local = shards_of(logits, num_ranks, lambda part, _: draft_topk_shard(part, k, first_id=0))
        assert not torch.equal(merge_topk(local).token_ids, whole.token_ids)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_ranks", [1, 2, 8, 32])
@pytest.mark.parametrize("sampler", [(0.0, 1.0), (1.0, 1.0), (1.0, 0.9), (0.3, 0.5), (1.5, 1e-9)], ids=str)
def test_the_draw_of_all_shards_is_that_of_torch(sampler, num_ranks, device):
    logits, settings = hard_logits(4096, device), options(sampler, 2, 5, device)

    def candidates(first_id=None):
        def work(part, first):
            return target_sample_shard(part, first_id=first if first_id is None else first_id, **settings)

        return shards_of(logits, num_ranks, work, apart=True)

    shards = candidates()
    got, want = merge_candidates(shards), merge_candidates(shards, impl="reference")
    assert torch.equal(got.top.isnan(), want.top.isnan())
    finite = ~want.top.isnan()  # no token is drawn from the others, whatever is left of their candidates
    for name, ours, theirs in zip(SampleShard._fields, got, want, strict=True):
        assert torch.equal(ours[finite], theirs[finite]), name
    mass = None
    temperature, top_p = sampler[:2]
    if temperature > 0 and top_p < 1:
        mass = top_p_mass_shard(logits, got, first_id=0, temperature=temperature)
    tokens = choose_token(got, mass, top_p=top_p)
    assert torch.equal(tokens, sample_shards.choose_token(want, mass, top_p=top_p))
    local = candidates(first_id=0)
    if num_ranks > 1:
        assert not torch.equal(merge_candidates(local).token_ids, got.token_ids)
    if shards.scores.shape[-1] == 1:
        assert torch.equal(best_candidate(shards), tokens)
        assert num_ranks == 1 or not torch.equal(best_candidate(local), tokens)
    else:
        with pytest.raises(ShapeError, match=r"shards.scores"):
            best_candidate(shards)


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_candidates_the_smaller_id_is_drawn(device):
    scores = torch.tensor([[1.0, -torch.inf, 0.0], [1.0, -torch.inf, -0.0]], dtype=torch.float64, device=device)
    ids = torch.tensor([[9, -1, 7], [4, -1, 8]], dtype=torch.int32, device=device)
    fields = (field.view(2, 1, 3, 1) for field in (scores, ids, scores.float()))
    shards = SampleShard(*fields, scores.float().view(2, 1, 3))
    assert best_candidate(shards).tolist() == [[4, -1, 7]]
    assert best_candidate(shards._replace(top=torch.full_like(shards.top, torch.nan))).tolist() == [[-1, -1, -1]]


@gpu
def test_ops_are_registered_as_torch_wants_them():
    logits = random_logits(2, 3, 512, dtype=torch.bfloat16)
    settings = options((1.0, 0.9), 2, 3)
    top = shards_of(logits, 4, lambda part, first: draft_topk_shard(part, 16, first_id=first))
    draws = shards_of(logits, 4, lambda part, first: target_sample_shard(part, first_id=first, **settings))
    merged = merge_candidates(draws)
    mass = top_p_mass_shard(logits, merged, first_id=0, temperature=1.0)
    for op, arguments in (
        (torch.ops.kdlab.merge_topk, tuple(top)),
        (torch.ops.kdlab.merge_candidates, tuple(draws)),
        (torch.ops.kdlab.best_candidate, (draws.scores[..., :1], draws.token_ids[..., :1], draws.top)),
        (torch.ops.kdlab.choose_token, (merged.token_ids, merged.top, mass, 0.9)),
    ):
        torch.library.opcheck(op.default, arguments)


def test_bad_arguments_are_named():
    shards = shards_of(torch.randn(1, 2, 64), 2, lambda part, first: draft_topk_shard(part, 3, first_id=first))
    with pytest.raises(ShapeError, match=r"shards.values"):
        merge_topk(shards._replace(values=shards.values[0]))
    with pytest.raises(UnsupportedDevice, match="cuda"):
        merge_topk(shards, impl="cuda")
    with pytest.raises(ArgumentError, match="impl"):
        merge_topk(shards, impl="quick")


@gpu
def test_shards_that_the_kernel_cannot_read_are_refused():
    logits = random_logits(1, 2, 64)
    shards = shards_of(logits, 2, lambda part, first: draft_topk_shard(part, 3, first_id=first))
    with pytest.raises(ShapeError, match=r"shards.lse"):
        merge_topk(shards._replace(lse=shards.lse.float()))
    with pytest.raises(ShapeError, match=r"shards.token_ids"):
        merge_topk(shards._replace(token_ids=shards.token_ids[..., :2]))
    with pytest.raises(ArgumentError, match="ranks"):
        merge_topk(TopKShard(*(field.repeat(17, *[1] * (field.dim() - 1)) for field in shards)))
