"""Every implementation of verify_attention on a GPU against float64: tile edges, masks, batches, poison, graphs."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from kdlab.errors import NotSupported, UnsupportedDevice
from kdlab.kernels.verify_attention import IMPLS, verify_attention
from tests.kernels.compare import assert_faults_are_found, assert_within_budget, guarded_allocations
from tests.kernels.verify_cases import SCALE, chain_parents, make_case, with_bit, with_key

pytestmark = pytest.mark.gpu
KERNELS = [impl for impl in IMPLS if impl not in ("auto", "reference")]
FIXED = [impl for impl in KERNELS if impl in ("naive", "mma", "wgmma")]
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
MOST_ROWS = {8: 129, 16: 129, 32: 65, 64: 33}  # a tile is 64 (row, head) pairs, whatever the heads
PREFIXES = (0, 1, 63, 64, 65, 127, 128, 129, 1000, 4096)


@pytest.fixture(params=KERNELS)
def impl(request):
    """An implementation that this GPU can run."""
    return runnable(request.param)


@pytest.fixture(params=FIXED)
def fixed_impl(request):
    return runnable(request.param)


def runnable(impl):
    try:
        attend(make_case([0], [1], 8), impl)
    except UnsupportedDevice as error:
        # The portable kernels run on every card that kdlab supports: there a refusal is a fault.
        if impl in ("naive", "mma") or (impl == "wgmma" and torch.cuda.get_device_capability() == (9, 0)):
            raise
        pytest.skip(str(error))
    return impl


def attend(case, impl, **options):
    return verify_attention(*case.tensors, scale=SCALE, latent_dim=case.latent, impl=impl, **options)


@cache
def known(prefixes, nodes, heads, **options):
    """A case with its results in float64 and in its own dtype, made once for all implementations."""
    case = make_case(prefixes, nodes, heads, **options)
    return case, case.expected(), case.expected(case.q.dtype)[0]


@pytest.fixture(scope="module", autouse=True)
def forget_known_cases():
    yield
    known.cache_clear()
    zero_queries.cache_clear()


def check(impl, prefixes, nodes, heads, *, fixed_split=False, **options):
    case, (exact, exact_lse), plain = known(tuple(prefixes), tuple(nodes), heads, **options)
    o, lse = attend(case, impl, fixed_split=fixed_split)
    check_result(o, lse, exact, exact_lse, plain, max(prefixes))
    return o, lse


def check_result(o, lse, exact, exact_lse, plain, prefix=0):
    assert o.dtype == plain.dtype
    assert lse.dtype == torch.float32
    assert_within_budget(o, exact, plain, "o")
    unused = exact_lse == -torch.inf
    assert torch.equal(unused, lse == -torch.inf)
    # A float32 sum of many weights, one after another in the naive kernel, drifts by a rounding each.
    tolerance = {"atol": 2e-5 + 1e-8 * prefix, "rtol": 2e-6}
    torch.testing.assert_close(lse.double()[~unused], exact_lse.double()[~unused], **tolerance)


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_rows_and_prefixes_at_tile_edges(impl, heads):
    start = {8: 0, 16: 3, 32: 5, 64: 7}[heads]
    for number, rows in enumerate(rows for rows in ROWS if rows <= MOST_ROWS[heads]):
        for step in (0, 4) if heads == 8 else (0,):
            prefix = PREFIXES[(start + number + step) % len(PREFIXES)]
            check(impl, [prefix], [rows], heads, seed=rows)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_prefix_with_a_small_tree(impl, prefix):
    for heads, rows in ((8, 9), (64, 2)):
        check(impl, [prefix], [rows], heads, seed=prefix)


@pytest.mark.parametrize(("prefix", "rows", "heads"), [(65, 1025, 4), (0, 1025, 1), (65536, 3, 64), (262144, 1, 8)])
def test_large_trees_and_long_prefixes(impl, prefix, rows, heads):
    if impl == "naive" and prefix > 65536:
        pytest.skip("a warp takes a second for so many keys")
    if impl == "flashmla" and heads < 8:
        pytest.skip("FlashMLA's own limits")
    check(impl, [prefix], [rows], heads, seed=3)


@pytest.mark.parametrize("heads", [1, 3, 5, 128])
def test_any_number_of_heads(impl, heads):
    if impl == "flashmla":
        pytest.skip("FlashMLA's own limits")
    check(impl, [70, 0], [13, 40], heads, seed=heads)


def test_half_precision(impl):
    o, _ = check(impl, [129, 0, 1000], [17, 33, 0], 16, dtype=torch.float16)
    assert o.dtype == torch.float16


def test_naive_takes_float32_and_other_widths():
    check("naive", [65, 0], [9, 17], 4, dtype=torch.float32)
    check("naive", [65, 0], [9, 17], 3, dtype=torch.float32, latent=48, rope=20)


MIXED = (0, 1, 5000, 64, 0, 300), (33, 1, 17, 0, 65, 129)


def test_mixed_batch_between_canaries(impl):
    """Unused rows and pages are NaN, what no stream uses comes back as 0 and -inf, and no neighbour byte changes."""
    case, (exact, exact_lse), plain = known(*MIXED, 16, seed=5)
    with guarded_allocations() as check_canaries:
        o, lse = attend(case, impl)
        check_canaries()
    check_result(o, lse, exact, exact_lse, plain)
    assert (o[3] == 0).all()
    assert (lse[3] == -torch.inf).all()
    assert_faults_are_found(o, exact, plain, tile=64)


def test_members_of_a_batch_equal_their_own_runs(impl):
    case = known(*MIXED, 16, seed=5)[0]
    o, lse = attend(case, impl)
    for stream in range(len(case.prefix_len)):
        alone, alone_lse = attend(case.alone(stream), impl)
        torch.testing.assert_close(o[stream], alone[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[stream], alone_lse[0], atol=1e-5, rtol=1e-6)


def test_fixed_split_gives_the_same_bits_alone_and_in_a_batch(fixed_impl):
    for heads in (8, 16):
        case, (exact, exact_lse), plain = known(*MIXED, heads, seed=5)
        o, lse = attend(case, fixed_impl, fixed_split=True)
        check_result(o, lse, exact, exact_lse, plain)
        for stream in range(len(case.prefix_len)):
            alone, alone_lse = attend(case.alone(stream), fixed_impl, fixed_split=True)
            assert torch.equal(o[stream], alone[0])
            assert torch.equal(lse[stream], alone_lse[0])


@pytest.mark.parametrize("prefix", [0, 100, 4096, 9000])
def test_fixed_split_gives_a_row_the_same_bits_among_1_8_and_65_rows(fixed_impl, prefix):
    for heads in (8, 64):
        case = make_case([prefix], [65], heads, parents=chain_parents, seed=1)
        rows = [attend(first_rows(case, n), fixed_impl, fixed_split=True)[0][0, 0] for n in (1, 8, 65)]
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[0], rows[2])


def first_rows(case, count):
    words = case.ancestors.view(torch.int32)[:, :count, : -(-count // 32)].contiguous().view(torch.uint32)
    nodes = torch.full_like(case.num_nodes, count)
    return replace(case, q=case.q[:, :count].contiguous(), ancestors=words, num_nodes=nodes)


@pytest.mark.parametrize("impl", [impl for impl in KERNELS if impl not in FIXED])
def test_others_have_no_fixed_split(impl):
    with pytest.raises((NotSupported, UnsupportedDevice)):
        attend(make_case([5], [3], 64), impl, fixed_split=True)


@pytest.mark.parametrize("prefix", [0, 5, 64, 1000, 4096])
def test_a_loud_key_is_heard_where_allowed_and_nowhere_else(impl, prefix):
    """Row 2 is loud; of its siblings' rows only row 5 sees it."""
    case = make_case([prefix], [8], 16, parents=lambda n, rng: [-1, *[0] * (n - 1)], seed=2)
    case = replace(case, q=case.q.abs())
    case = with_bit(case, 0, 5, 2)
    before, _ = attend(case, impl)
    loud = with_key(case, 0, prefix + 2, 30.0)
    after, lse = attend(loud, impl)
    exact, exact_lse = loud.expected()
    check_result(after, lse, exact, exact_lse, loud.expected(torch.bfloat16)[0])
    changed = (after.float() - before.float()).abs().amax((-1, -2))[0] > 1
    assert changed.tolist() == [False, False, True, False, False, True, False, False]
    leaked, _ = attend(with_bit(loud, 0, 6, 2), impl)  # the broken twin: a sibling leaks
    with pytest.raises(AssertionError):
        assert_within_budget(leaked, exact, loud.expected(torch.bfloat16)[0])


def test_far_siblings_over_several_tiles(impl):
    for seed in range(2):
        check(impl, [0, 77, 640], [130, 130, 129], 8, seed=seed)


def test_a_hidden_ancestor_is_missed(impl):
    case, (exact, _), plain = known((0,), (130,), 8, seed=4)
    row = 129
    ancestor = int(case.mask()[0, row].nonzero()[-2])
    without, _ = attend(with_bit(case, 0, row, ancestor, value=False), impl)
    with pytest.raises(AssertionError):
        assert_within_budget(without, exact, plain)


def test_a_chain_equals_causal_attention(impl):
    check(impl, [100, 0], [70, 64], 8, parents=chain_parents)
    case = known((100, 0), (70, 64), 8, parents=chain_parents)[0]
    assert torch.equal(case.mask()[0], torch.ones(70, 70, dtype=torch.bool, device="cuda").tril())


def test_zero_queries_give_the_mean_of_what_is_visible(impl):
    """Every length 1 to 300, each a stream of its own."""
    case = zero_queries()
    o, lse = attend(case, impl)
    lengths = torch.arange(1, 301, device="cuda")
    key = torch.arange(300, device="cuda")
    rows = case.block_table.long()[:, key // 64] * 64 + key % 64
    keys = case.pages.view(-1, 576)[rows, :512].double()  # [S, 300, C]
    visible = (key < lengths[:, None])[..., None]
    mean = torch.where(visible, keys, 0.0).sum(1) / lengths[:, None]
    assert (o[:, 0].double() - mean[:, None]).abs().max() < 4e-3 * mean.abs().max()
    torch.testing.assert_close(lse[:, 0], lengths.float().log()[:, None].expand(-1, 8), atol=1e-5, rtol=1e-6)


@cache
def zero_queries():
    case = make_case(range(300), [1] * 300, 8)
    return replace(case, q=torch.zeros_like(case.q))


def test_one_graph_serves_other_lengths_and_trees(impl):
    first = make_case(*MIXED, 16, seed=6)
    second = make_case([4000, 0, 1, 777, 64, 5000], [5, 65, 129, 1, 0, 17], 16, seed=7)
    width = max(first.block_table.shape[1], second.block_table.shape[1])
    pages = torch.full((len(first.pages) + len(second.pages), 64, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    pages[: len(first.pages)], pages[len(first.pages) :] = first.pages, second.pages
    tables = [torch.nn.functional.pad(c.block_table, (0, width - c.block_table.shape[1])) for c in (first, second)]
    first, second = replace(first, pages=pages, block_table=tables[0]), replace(
        second, pages=pages, block_table=tables[1] + len(first.pages)
    )
    held = replace(first, **{name: getattr(first, name).clone() for name in FIELDS})
    attend(held, impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = attend(held, impl)
    for case in (first, second, first):
        for name in FIELDS:
            getattr(held, name).copy_(getattr(case, name))
        graph.replay()
        exact, exact_lse = case.expected()
        assert_within_budget(o, exact, case.expected(torch.bfloat16)[0])
        assert torch.equal(exact_lse == -torch.inf, lse == -torch.inf)


FIELDS = ("q", "block_table", "prefix_len", "ancestors", "num_nodes")


def test_opcheck(impl):
    case = make_case([70, 0], [5, 9], 8)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    op = torch.ops.kdlab.verify_attention.default
    torch.library.opcheck(op, (*case.tensors, SCALE, case.latent, impl, False), test_utils=tests)
