"""Attention, experts, norm and commit against oracles in float64 that share no code with them."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from kdlab.errors import ArgumentError, ShapeError
from kdlab.kernels.experts import DenseExperts, PackedExperts
from kdlab.kernels.int4 import dequantize_int4, pack_int4
from kdlab.kernels.reference import kv_commit, moe_experts, rms_norm, verify_attention

HEADS, LATENT, ROPE, SCALE = 3, 12, 4, 0.3
WIDTH = LATENT + ROPE
PREFIXES = [0, 1, 63, 64, 65, 130]


def random_tree(num_rows, generator):
    mask = torch.eye(num_rows, dtype=torch.bool)
    for row in range(1, num_rows):
        mask[row] |= mask[int(torch.randint(0, row, (), generator=generator))]
    return mask


def attention_case(prefixes, num_rows, dtype=torch.float64, seed=0):
    """Pages whose every row outside prefix and tree is NaN, in a scattered order."""
    generator = torch.Generator().manual_seed(seed)
    streams, pages_each = len(prefixes), (max(prefixes) + num_rows + 63) // 64 + 1
    table = torch.randperm(streams * pages_each, generator=generator).view(streams, pages_each).int()
    pages = torch.full((streams * pages_each, 64, WIDTH), torch.nan, dtype=dtype)
    for stream, prefix in enumerate(prefixes):
        for row in range(prefix + num_rows):
            values = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
            pages[table[stream, row // 64], row % 64] = values.to(dtype)
    q = torch.randn(streams, num_rows, HEADS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.stack([random_tree(num_rows, generator) for _ in prefixes])
    return q, pages, table, torch.tensor(prefixes, dtype=torch.int32), mask


def oracle(q, pages, table, prefix_len, mask):
    """One row and head at a time, in float64."""
    o = torch.zeros(*q.shape[:3], LATENT, dtype=torch.float64)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    for s, prefix in enumerate(prefix_len.tolist()):
        for i in range(q.shape[1]):
            index = [*range(prefix), *(prefix + j for j in range(q.shape[1]) if mask[s, i, j])]
            if not index:
                continue
            keys = torch.stack([pages[table[s, j // 64], j % 64] for j in index]).double()
            for h in range(q.shape[2]):
                scores = SCALE * (keys @ q[s, i, h].double())
                lse[s, i, h] = scores.logsumexp(0)
                o[s, i, h] = (scores - lse[s, i, h]).exp() @ keys[:, :LATENT]
    return o, lse


def attend(case):
    return verify_attention(*case, SCALE, LATENT)


@pytest.mark.parametrize("num_rows", [1, 2, 17, 33])
def test_attention_equals_the_oracle(num_rows):
    case = attention_case(PREFIXES, num_rows)
    (o, lse), (expected, expected_lse) = attend(case), oracle(*case)
    assert_close(o, expected, atol=1e-12, rtol=1e-12)
    assert lse.dtype == torch.float32
    assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-6)


def test_bfloat16_is_as_good_as_one_rounding():
    case = attention_case([65], 17, torch.bfloat16)
    o, _ = attend(case)
    expected, _ = oracle(*case)
    assert o.dtype == torch.bfloat16
    assert ((o.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()


def test_a_batch_equals_its_streams():
    q, pages, table, prefix, mask = attention_case(PREFIXES, 9)
    together, _ = attend((q, pages, table, prefix, mask))
    for s in range(len(PREFIXES)):
        alone, _ = attend((q[s, None], pages, table[s, None], prefix[s, None], mask[s, None]))
        assert_close(together[s], alone[0], atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("prefix", [0, 5, 64, 1000])
def test_a_loud_key_is_heard_where_allowed_and_nowhere_else(prefix):
    q, pages, table, length, mask = attention_case([prefix], 8)
    q = q.abs()
    mask[:] = torch.eye(8, dtype=torch.bool)
    mask[0, 5, 2] = True
    before, _ = attend((q, pages, table, length, mask))
    loud = prefix + 2
    pages[table[0, loud // 64], loud % 64] = 1e3
    after, _ = attend((q, pages, table, length, mask))
    changed = (after - before).abs().amax((-1, -2))[0] > 1
    assert changed.tolist() == [False, False, True, False, False, True, False, False]
    mask[0, 6, 2] = True  # the broken twin: a sibling leaks
    leaked, _ = attend((q, pages, table, length, mask))
    assert (leaked - after).abs()[0, 6].max() > 1


def test_hidden_tree_rows_may_hold_nan():
    q, pages, table, prefix, mask = attention_case([0, 70], 6)
    expected, _ = attend((q, pages, table, prefix, mask))
    mask = F.pad(mask, (0, 3, 0, 3))
    padded = F.pad(q, (0, 0, 0, 0, 0, 3))
    o, lse = attend((padded, pages, table, prefix, mask))
    assert_close(o[:, :6], expected, atol=1e-13, rtol=1e-13)
    # Without a prefix a padded row sees nothing; behind one it still sees the prefix.
    assert (o[0, 6:] == 0).all()
    assert (lse[0, 6:] == -torch.inf).all()
    assert o[1, 6:].isfinite().all()
    assert lse[1, 6:].isfinite().all()


def test_a_stream_that_sees_nothing_gives_zeros_not_nan():
    q, pages, table, prefix, mask = attention_case([0], 3)
    o, lse = attend((q, torch.full_like(pages, torch.nan), table, prefix, torch.zeros_like(mask)))
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


def test_zero_queries_give_the_plain_mean():
    for prefix in (1, 62, 63, 64, 65, 130):
        q, pages, table, length, mask = attention_case([prefix], 1)
        o, lse = attend((torch.zeros_like(q), pages, table, length, mask))
        rows = torch.stack([pages[table[0, j // 64], j % 64] for j in range(prefix + 1)])
        assert_close(o[0, 0, 0], rows[:, :LATENT].mean(0))
        assert_close(lse[0, 0, 0], torch.tensor(float(prefix + 1)).log())


def test_wrong_attention_arguments_are_named():
    q, pages, table, prefix, mask = attention_case([3], 4)
    with pytest.raises(ShapeError, match="q: expected"):
        attend((q[..., :-1], pages, table, prefix, mask))
    with pytest.raises(ShapeError, match="mask"):
        attend((q, pages, table, prefix, mask[:, :3]))
    with pytest.raises(ShapeError, match="prefix_len"):
        attend((q, pages, table, prefix[:0], mask))
    with pytest.raises(ArgumentError, match="cache rows 0 to 127"):
        attend((q, pages, table, prefix + 125, mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(5, 48, generator=generator, dtype=torch.float64).to(dtype) * 3 for _ in range(2))
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = normed.to(dtype) * weight[0]
    got = rms_norm(x, weight[0], 1e-3)
    assert got.dtype == dtype
    assert_close(got, expected, atol={torch.bfloat16: 0.07}.get(dtype, 1e-5), rtol=1e-5)


def expert_case(dtype=torch.float64, experts=6, width=64, inner=32, rows=7, top_k=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(rows)])
    weights = torch.rand(rows, top_k, generator=generator)
    gate_up = torch.randint(-8, 8, (experts, 2 * inner, width), generator=generator)
    down = torch.randint(-8, 8, (experts, width, inner), generator=generator)
    shapes = [(*w.shape[:2], w.shape[2] // 32) for w in (gate_up, down)]
    scales = [torch.rand(shape, generator=generator).bfloat16() * 0.05 for shape in shapes]
    packed = PackedExperts(pack_int4(gate_up), scales[0], pack_int4(down), scales[1])
    dense = [
        dequantize_int4(words, scale, dtype)
        for words, scale in ((packed.gate_up_packed, scales[0]), (packed.down_packed, scales[1]))
    ]
    return x.to(dtype), ids, weights, DenseExperts(*dense), packed


def expert_oracle(x, ids, weights, dense):
    out = torch.zeros_like(x)
    for t, k in torch.cartesian_prod(torch.arange(len(ids)), torch.arange(ids.shape[1])).tolist():
        gate, up = (dense.gate_up[ids[t, k]] @ x[t]).chunk(2)
        out[t] += weights[t, k] * (dense.down[ids[t, k]] @ (gate * torch.sigmoid(gate) * up))
    return out


@pytest.mark.parametrize("rows", [1, 2, 7, 65])
def test_experts_equal_the_oracle_and_packed_equal_dense(rows):
    x, ids, weights, dense, packed = expert_case(rows=rows)
    expected = expert_oracle(x, ids, weights, dense)
    assert_close(moe_experts(x, ids, weights, dense), expected, atol=1e-12, rtol=1e-12)
    assert torch.equal(moe_experts(x, ids, weights, packed), moe_experts(x, ids, weights, dense))


def test_each_distinct_expert_is_read_once():
    x, ids, weights, dense, _ = expert_case(rows=9)
    ids[ids == 4] = 5
    read = []

    class Counted:
        num_experts = dense.num_experts

        def matrices(self, expert, dtype):
            read.append(expert)
            return dense.matrices(expert, dtype)

    moe_experts(x, ids, weights, Counted())
    assert read == sorted(set(ids.flatten().tolist()))


def test_bfloat16_experts_sum_in_float32():
    x, ids, weights, dense, packed = expert_case(torch.bfloat16)
    wide = DenseExperts(dense.gate_up.double(), dense.down.double())
    expected = expert_oracle(x.double(), ids, weights, wide)
    got = moe_experts(x, ids, weights, packed)
    assert got.dtype == torch.bfloat16
    assert_close(got.double(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("path", [[0, 2, 3], [0, 5], [0, 1, 4, 9], [0], [], list(range(10))])
@pytest.mark.parametrize("prefix", [0, 62, 64])
def test_commit_moves_the_path_in_all_layers_and_nothing_else(path, prefix):
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    pages = torch.randn(3, 4, 64, 5, generator=generator)
    before = pages.clone()
    padded = torch.full((2, 11), -1)
    padded[0, : len(path)] = torch.tensor(path, dtype=torch.long)
    padded[1, :2] = torch.tensor([0, 3])
    kv_commit(pages, table, torch.tensor([prefix, 7]), padded)
    streams = [[p[:, table[s]].flatten(1, 2) for p in (before, pages)] for s in range(2)]
    for (old, new), start, moved in zip(streams, (prefix, 7), (path, [0, 3]), strict=True):
        expected = old.clone()
        for depth, row in enumerate(moved):
            expected[:, start + depth] = old[:, start + row]
        assert torch.equal(new, expected)


def test_commit_at_the_very_end_of_the_cache():
    pages, table = torch.arange(64.0).view(1, 1, 64, 1), torch.tensor([[0]])
    kv_commit(pages, table, torch.tensor([60]), torch.tensor([[0, 3, -1, -1, -1, -1, -1, -1]]))
    assert pages.flatten()[60:].tolist() == [60, 63, 62, 63]
    kv_commit(pages, table, torch.tensor([64]), torch.full((1, 8), -1))
    with pytest.raises(ArgumentError, match="cache rows 0 to 63"):
        kv_commit(pages, table, torch.tensor([60]), torch.tensor([[0, 4]]))
