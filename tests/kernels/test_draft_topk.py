"""draft_topk: ids equal the reference's, log-probabilities float64's, for rows, batches, shards and hostile logits."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, ShapeError, UnsupportedDevice
from kdlab.kernels import reference
from kdlab.kernels.draft_topk import (
    TopK,
    draft_topk,
    draft_topk_cost,
    draft_topk_shard,
    merge_topk,
)
from tests.kernels.compare import assert_within_budget, guarded_allocations

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABS = [1, 2, 31, 257, 1000, 20_480, 163_840, 262_144]
KS = [1, 16, 64, 256]


def random_logits(*shape, seed=0, std=4.0, dtype=torch.bfloat16, device="cuda"):
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device) * std).to(dtype)


def assert_same_topk(got, logits, what=""):
    """Ids and flags are the reference's; log-probabilities are as near to float64 as torch's topk and logsumexp."""
    k = got.token_ids.shape[-1]
    expected = reference.draft_topk(logits, k)
    assert torch.equal(got.nonfinite, expected.nonfinite), what
    assert torch.equal(got.token_ids, expected.token_ids), what
    ids, wide = got.token_ids.long(), logits.float()
    exact = logits.double().log_softmax(-1).gather(-1, ids)
    plain = wide.gather(-1, ids) - wide.logsumexp(-1, keepdim=True)
    bad = expected.nonfinite[..., None]
    exact, plain = (torch.where(bad, torch.nan, t) for t in (exact, plain))
    assert_within_budget(got.log_probs, exact, plain, what)


def check_all_k(logits, what):
    """The largest K within budget, the smaller ones its beginnings bit for bit."""
    vocab = logits.shape[-1]
    *smaller, most = sorted({*(k for k in KS if k <= vocab), min(vocab, max(KS))})
    largest = draft_topk(logits, most)
    assert_same_topk(largest, logits, what)
    for k in smaller:
        top = draft_topk(logits, k)
        bits = top.log_probs.view(torch.int32), largest.log_probs[..., :k].contiguous().view(torch.int32)
        assert torch.equal(top.token_ids, largest.token_ids[..., :k]), f"{what} K {k}"
        assert torch.equal(*bits), f"{what} K {k}"


def hostile_rows(vocab, dtype, device):
    """Rows of one batch that stress order, ties, clustering and range."""
    rising = torch.arange(vocab, device=device).float()
    rows = {
        "all equal": torch.zeros(vocab, device=device),
        "few values": (rising * 7919 % 5),
        "rising": rising,
        "falling": -rising,
        "signed zeros": torch.where(rising % 3 == 0, -0.0, 0.0),
        "every second -inf": torch.where(rising % 2 == 0, -torch.inf, rising * 1e-3),
        "one finite": torch.where(rising == vocab // 2, 3.0, -torch.inf),
        "one thread's": torch.where(rising % 4096 < 8, rising, -rising),
        "large": (rising % 11 - 5) * 6000,
        "peaked": torch.where(rising == vocab - 1, 30.0, torch.sin(rising)),
    }
    return torch.stack(list(rows.values()))[None].to(dtype)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_every_size_and_k_equals_the_reference(vocab, dtype):
    check_all_k(random_logits(2, 3, vocab, dtype=dtype), f"V {vocab}")


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [31, 1000, 20_481, 163_840, 200_000])
def test_hostile_rows_equal_the_reference(vocab, dtype):
    check_all_k(hostile_rows(vocab, dtype, "cuda"), f"V {vocab}")


@gpu
@pytest.mark.parametrize("k", [8, 64, 224, 256])
def test_more_threads_than_k_full_of_equal_logits_do_not_overflow(k):
    """Every vector of a few threads more than K, in one block: the most candidates that a block can meet."""
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.zeros(1, 2, 163_840, dtype=dtype, device="cuda")
        per_vector = 16 // dtype.itemsize
        chunk = 40_960 // dtype.itemsize
        logits[0, 0, :chunk].view(5, 512, per_vector)[:, : k + k // 8] = 2.0
        assert_same_topk(draft_topk(logits, k), logits)


@gpu
def test_a_wrong_answer_is_noticed():
    logits = random_logits(1, 2, 5000)
    good = draft_topk(logits, 16)
    ids, log_probs = good.token_ids.clone(), good.log_probs.clone()
    ids[0, 0, 3], ids[0, 0, 4] = good.token_ids[0, 0, 4], good.token_ids[0, 0, 3]
    log_probs[0, 1] += 1e-4
    for twin in (TopK(ids, good.log_probs, good.nonfinite), good._replace(log_probs=log_probs),
                 good._replace(nonfinite=~good.nonfinite)):  # fmt: skip
        with pytest.raises((AssertionError, RuntimeError)):
            assert_same_topk(twin, logits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocab", [1, 700, 50_000])
def test_rows_that_are_not_finite_are_flagged_alone(fault, vocab, device):
    places = sorted({0, vocab // 2, vocab - 1})
    logits = random_logits(1, len(places) + 3, vocab, device=device, dtype=torch.float32)
    clean, k = logits.clone(), min(16, vocab)
    for row, place in enumerate(places):
        logits[0, row, place] = fault
    logits[0, len(places)] = -torch.inf
    logits[0, len(places) + 1, ::2] = torch.nan  # more of them than any buffer of candidates holds
    got, expected = draft_topk(logits, k), reference.draft_topk(logits, k)
    assert got.nonfinite.tolist() == [[True] * (len(places) + 2) + [False]]
    assert torch.equal(got.token_ids, expected.token_ids)
    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=2.0**-22, atol=2.0**-20, equal_nan=True)
    assert got.log_probs[0, :-1].isnan().all()
    assert torch.equal(got.log_probs[0, -1], draft_topk(clean, k).log_probs[0, -1])


@gpu
def test_a_row_has_the_same_bits_alone_and_in_any_batch():
    for vocab in (1001, 163_840):
        logits = random_logits(8, 15, vocab)
        whole = draft_topk(logits, 64)
        for stream, row in ((0, 0), (3, 7), (7, 14)):
            alone = draft_topk(logits[stream : stream + 1, row : row + 1].clone(), 64)
            assert torch.equal(alone.log_probs[0, 0], whole.log_probs[stream, row])
            assert torch.equal(alone.token_ids[0, 0], whole.token_ids[stream, row])


@gpu
def test_views_are_read_in_place():
    flat = random_logits(1, 1, 3 * 4 * 5003 + 8).flatten()
    for start in range(9):  # every misalignment of 16-byte reads
        logits = flat[start : start + 3 * 4 * 5003].view(3, 4, 5003)
        assert_same_topk(draft_topk(logits, 16), logits, f"start {start}")
    padded = random_logits(3, 5, 4096)
    for logits in (padded[..., :4001], padded[1:, ::2, 3:3000], padded.transpose(0, 1), padded[:1].expand(3, -1, -1)):
        assert_same_topk(draft_topk(logits, 16), logits)


@gpu
def test_nothing_is_written_or_allocated_beside_the_outputs():
    for vocab, k in ((31, 16), (163_840, 256), (262_144, 64)):
        logits = random_logits(2, 3, vocab)
        draft_topk(logits, k)
        with guarded_allocations() as check:
            assert_same_topk(draft_topk(logits, k), logits)
        check()


@gpu
def test_a_graph_replays_with_other_data():
    logits = random_logits(1, 15, 163_840)
    draft_topk(logits, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top = draft_topk(logits, 64)
    for seed in (1, 2):
        logits.copy_(random_logits(1, 15, 163_840, seed=seed))
        graph.replay()
        assert_same_topk(top, logits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_shards", [2, 8])
@pytest.mark.parametrize(("vocab", "k"), [(40, 16), (1000, 16), (20_480, 64), (163_840, 256)])
def test_shards_merge_to_the_whole(vocab, k, num_shards, device):
    logits = random_logits(2, 5, vocab, std=2.0, device=device, dtype=torch.bfloat16)
    logits[0, 0] = logits[0, 0].round()
    logits[0, 1] = -torch.inf
    logits[0, 1, vocab // 3] = 1.0
    logits[1, 2, vocab - 1], logits[1, 3] = torch.nan, -torch.inf
    whole = draft_topk(logits, k)
    width = -(-vocab // num_shards) + 24  # padding columns hold what must not be read
    shards = []
    for rank in range(num_shards):
        first = min(rank * (width - 24), vocab)
        own = logits[..., first : first + width - 24]
        padded = torch.full((2, 5, width), torch.nan if rank % 2 else 1e4, dtype=logits.dtype, device=device)
        padded[..., : own.shape[-1]] = own
        shards.append(draft_topk_shard(padded, k, first_id=first, num_ids=own.shape[-1]))
    for order in (shards, shards[::-1]):
        merged = merge_topk(order)
        assert torch.equal(merged.token_ids, whole.token_ids)
        assert torch.equal(merged.nonfinite, whole.nonfinite)
        # One rounding of the log-sum-exp, which is below 16.
        assert torch.allclose(merged.log_probs, whole.log_probs, rtol=0, atol=2.0**-20, equal_nan=True)
    local = [shard._replace(token_ids=shard.token_ids - shard.token_ids.amin()) for shard in shards]
    assert not torch.equal(merge_topk(local).token_ids, whole.token_ids)  # the broken twin: local ids


@gpu
def test_offsets_pass_two_to_the_31():
    logits = torch.full((1, 13_108, 163_840), -1.0, dtype=torch.float16, device="cuda")
    logits[0, -1] = random_logits(163_840, dtype=torch.float16)
    top = draft_topk(logits, 64)
    for row in (0, 13_106, 13_107):
        assert_same_topk(TopK(*(t[:, row : row + 1] for t in top)), logits[:, row : row + 1])


@gpu
def test_opcheck():
    torch.library.opcheck(torch.ops.kdlab.draft_topk.default, (random_logits(2, 3, 500), 16, 0, 500, False))
    torch.library.opcheck(torch.ops.kdlab.draft_topk.default, (random_logits(2, 3, 500), 16, 500, 400, True))


def test_fake_tensors_have_the_right_shapes():
    with FakeTensorMode():
        logits = torch.empty(2, 3, 5000, dtype=torch.bfloat16, device="cuda")
        top = draft_topk(logits, 16)
        shard = draft_topk_shard(logits, 16, first_id=5000)
    assert [(t.shape, t.dtype, t.device.type) for t in top] == [
        ((2, 3, 16), torch.float32, "cuda"), ((2, 3, 16), torch.int32, "cuda"), ((2, 3), torch.bool, "cuda")
    ]  # fmt: skip
    assert (shard.lse.shape, shard.lse.dtype) == ((2, 3), torch.float64)


def test_the_cpu_runs_the_reference():
    logits = random_logits(2, 3, 50, device="cpu")
    for impl in ("auto", "reference"):
        for ours, theirs in zip(draft_topk(logits, 7, impl=impl), reference.draft_topk(logits, 7), strict=True):
            assert torch.equal(ours, theirs)


def test_bad_arguments_are_named():
    logits = torch.zeros(1, 2, 16)
    for k in (0, 17, 2.0, True):
        with pytest.raises(ArgumentError, match="k: expected"):
            draft_topk(logits, k)
    with pytest.raises(ShapeError, match="logits"):
        draft_topk(logits[0], 1)
    with pytest.raises(ArgumentError, match="impl"):
        draft_topk(logits, 1, impl="fast")
    with pytest.raises(UnsupportedDevice, match="cpu"):
        draft_topk(logits, 1, impl="cuda")
    with pytest.raises(ArgumentError, match="num_ids"):
        draft_topk_shard(logits, 1, first_id=0, num_ids=17)
    with pytest.raises(ArgumentError, match="first_id"):
        draft_topk_shard(logits, 1, first_id=-1)
    with pytest.raises(ArgumentError, match="shards"):
        merge_topk([])
    with pytest.raises(ShapeError, match=r"shards\[1\]"):
        merge_topk([draft_topk_shard(logits, k, first_id=0) for k in (3, 4)])


@gpu
def test_what_the_kernel_cannot_read_is_refused():
    logits = random_logits(1, 2, 600)
    with pytest.raises(ArgumentError, match="k: expected at most 256"):
        draft_topk(logits, 257)
    with pytest.raises(ShapeError, match="float32, bfloat16 or float16"):
        draft_topk(logits.double(), 4)
    with pytest.raises(ShapeError, match="side by side"):
        draft_topk(random_logits(1, 600, 2).transpose(1, 2), 4)
    assert draft_topk(logits[:0], 4).token_ids.shape == (0, 2, 4)


def test_the_cost_is_one_read():
    assert draft_topk_cost(1, 15, 163_840, 64, dtype=torch.bfloat16).bytes == 15 * (163_840 * 2 + 64 * 8 + 1)
