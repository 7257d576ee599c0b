"""draft_topk and target_sample against naive float64 code, with ties, shards of nothing and non-finite rows."""

import math

import pytest
import torch

from kdlab.errors import ArgumentError, ShapeError
from kdlab.kernels.reference import draft_topk, target_sample


def naive_topk(row, k):
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    log_z = math.log(math.fsum(math.exp(value) for value in row))
    return order, [row[i] - log_z for i in order]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 5, 64])
def test_topk_matches_naive_code_with_exact_ties(dtype, k):
    logits = (torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)) * 4).round().to(dtype)
    top = draft_topk(logits, k)
    for s in range(2):
        for row in range(3):
            ids, log_probs = naive_topk(logits[s, row].double().tolist(), k)
            assert top.token_ids[s, row].tolist() == ids
            assert top.log_probs[s, row].tolist() == pytest.approx(log_probs, abs=1e-6)
    assert not top.nonfinite.any()
    assert top.log_probs.dtype == torch.float32
    assert top.token_ids.dtype == torch.int32


def test_equal_logits_rank_by_token_id_over_a_large_vocabulary():
    logits = torch.zeros(1, 1, 163_840)
    logits[..., 1::2] = -torch.inf
    assert draft_topk(logits, 64).token_ids[0, 0].tolist() == list(range(0, 128, 2))


@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_flagged_alone(fault):
    logits = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(2))
    clean = draft_topk(logits, 3)
    logits[0, 1, 7] = fault
    logits[0, 3] = -torch.inf
    top = draft_topk(logits, 3)
    assert top.nonfinite.tolist() == [[False, True, False, True]]
    assert top.log_probs[0, [1, 3]].isnan().all()
    assert torch.equal(top.log_probs[0, [0, 2]], clean.log_probs[0, [0, 2]])
    tokens = target_sample(logits, temperature=0.0, top_p=1.0, seed=0, stream=torch.tensor([0]),
                           position=torch.arange(4)[None])  # fmt: skip
    hot = target_sample(logits, temperature=1.0, top_p=0.9, seed=0, stream=torch.tensor([0]),
                        position=torch.arange(4)[None])  # fmt: skip
    for drawn in (tokens, hot):
        assert (drawn[0] < 0).tolist() == [False, True, False, True]


@pytest.mark.parametrize("k", [0, -1, 17, 2.0, True])
def test_topk_refuses_a_k_that_does_not_exist(k):
    with pytest.raises(ArgumentError, match="k: expected"):
        draft_topk(torch.zeros(1, 2, 16), k)
    with pytest.raises(ShapeError, match="logits"):
        draft_topk(torch.zeros(2, 16), 1)


def test_greedy_ties_go_to_the_smaller_id():
    logits = torch.tensor([[[0.0, 3.0, 3.0], [-torch.inf, -1.0, -1.0]]])
    tokens = target_sample(logits, temperature=0.0, top_p=1.0, seed=0, stream=torch.tensor([0]),
                           position=torch.tensor([[4, 5]]))  # fmt: skip
    assert tokens.tolist() == [[1, 1]]


def test_a_token_does_not_depend_on_what_else_is_in_the_batch():
    logits = torch.randn(4, 6, 50, generator=torch.Generator().manual_seed(3))
    stream, position = torch.arange(4) * 3, torch.arange(24).view(4, 6)
    options = dict(temperature=0.8, top_p=0.9, seed=5)
    whole = target_sample(logits, stream=stream, position=position, **options)
    for s in range(4):
        for n in range(6):
            alone = target_sample(logits[s : s + 1, n : n + 1], stream=stream[s : s + 1],
                                  position=position[s : s + 1, n : n + 1], **options)  # fmt: skip
            assert int(alone) == int(whole[s, n])


def test_low_temperature_is_greedy_and_top_p_keeps_the_crossing_token():
    logits = torch.tensor([[[math.log(0.5), math.log(0.3), math.log(0.2)]]]).expand(1, 4000, 3)
    position = torch.arange(4000)[None]
    options = dict(seed=9, stream=torch.tensor([0]), position=position)
    assert target_sample(logits, temperature=1e-6, top_p=1.0, **options).unique().tolist() == [0]
    kept = target_sample(logits, temperature=1.0, top_p=0.6, **options)[0].bincount(minlength=3) / 4000
    assert kept[2] == 0
    assert kept[0] == pytest.approx(0.625, abs=0.03)
    every = target_sample(logits, temperature=1.0, top_p=1.0, **options)[0].bincount(minlength=3) / 4000
    assert every.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.03)
