"""What the Hopper kernel has beside the other implementations: parts, shares of tiles, counters, tensor maps."""

import pytest
import torch

from kdlab.errors import NotSupported
from kdlab.kernels import counters
from kdlab.kernels import verify_attention_wgmma as wgmma
from kdlab.kernels.jit import Build, kernel
from kdlab.kernels.verify_attention import verify_attention
from kdlab.kernels.verify_attention_wgmma import block_keys, most_parts, parts_shares, spread_bytes
from tests.kernels.compare import assert_within_budget
from tests.kernels.verify_cases import SCALE, make_case


def test_few_tiles_are_cut_as_far_as_blocks_are_free():
    tiles = (1, 9, 16, 17, 33, 66, 67, 520)
    assert [most_parts(count, 2048, 132) for count in tiles] == [132, 14, 8, 7, 4, 2, 1, 1]
    assert [most_parts(count, 5, 132) for count in tiles] == [5, 5, 5, 5, 4, 2, 1, 1]


def test_blocks_of_keys_are_small_where_few_rows_meet_few_keys():
    assert [block_keys(*case) for case in ((8, 17), (16, 32), (17, 17), (8, 33))] == [32, 32, 64, 64]


def test_parts_go_to_few_warps():
    assert [parts_shares(most) for most in (2, 5, 14, 26, 44, 66, 132)] == [1, 2, 4, 4, 6, 9, 16]


def test_blocks_that_add_parts_up_are_spread():
    """A multiprocessor of 228 KB holds as many blocks as asked, each with 1 KB of its own, and no more."""
    assert [228 * 1024 // (spread_bytes(blocks) + 1024) for blocks in range(1, 33)] == [*range(1, 33)]


def test_quick_divisions_are_exact():
    """csrc/verify_wgmma_shares.cuh:cdiv_fast: key blocks of the longest table by all numbers of parts, 2 ulp off."""
    blocks = torch.arange(1, 2**17 + 1)
    for parts in range(1, 265):
        exact = -(-blocks // parts)
        quotient = ((blocks + parts).float() - 0.5) / float(parts)
        for ulps in (-2, 2):
            assert torch.equal((quotient.view(torch.int32) + ulps).view(torch.float32).int(), exact.int())


def test_every_way_is_built():
    assert len({str(build) for build in wgmma.BUILDS}) == 2 * 5


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 576), (torch.bfloat16, 320)])
def test_other_dtypes_and_widths_are_refused(dtype, width):
    q, pages = torch.zeros(1, 1, 8, width, dtype=dtype), torch.zeros(1, 64, width, dtype=dtype)
    ints, words = torch.ones(1, dtype=torch.int32), torch.ones(1, 1, 1, dtype=torch.int32).view(torch.uint32)
    o, lse = torch.zeros(1, 1, 8, width - 64, dtype=dtype), torch.zeros(1, 1, 8)
    with pytest.raises(NotSupported, match="q"):
        wgmma.run_wgmma(q, pages, ints[:, None], ints, words, ints, 1.0, False, o, lse)


@pytest.fixture(params=(1, 3, 40, 132))
def parts(request, monkeypatch):
    """The persistent grid, and few, many and the most parts of a tile, whatever the number of tiles."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a Hopper GPU")
    monkeypatch.setattr(wgmma, "most_parts", lambda *_: request.param)
    return request.param


def attend(case, **options):
    return verify_attention(*case.tensors, scale=SCALE, latent_dim=case.latent, impl="wgmma", **options)


def check(case):
    (exact, exact_lse), plain = case.expected(), case.expected(case.q.dtype)[0]
    o, lse = attend(case)
    assert_within_budget(o, exact, plain, "o")
    seen = exact_lse != -torch.inf
    assert torch.equal(seen, lse != -torch.inf)
    torch.testing.assert_close(lse.double()[seen], exact_lse.double()[seen], atol=2e-4, rtol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("prefixes", "nodes", "heads"),
    [
        ([20_000, 64], [3, 1], 64),  # tiles that many blocks share
        ([300, 0, 1000, 127], [70, 70, 0, 3], 64),  # more tiles than blocks
        ([0, 5000, 77], [33, 1, 12], 8),
        ([1000], [2], 8),  # blocks of half a page
        ([95, 1], [1, 1], 8),
        ([190] * 3, [65] * 3, 12),  # tiles that begin within a row
        ([1500] * 8, [9, 9, 9, 2, 9, 0, 9, 9], 64),  # all tiles of a stream cut at the same keys
    ],
)
def test_every_way_is_right_for_every_shape(parts, prefixes, nodes, heads):
    check(make_case(prefixes, nodes, heads, seed=heads))


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1], indirect=True)
def test_counters_are_zero_after_every_call(parts):
    case = make_case([20_000, 5000], [3, 9], 64, seed=1)
    attend(case)
    assert counters._rings
    assert not any(ring.any() for ring, _ in counters._rings.values())


LATE = """extern "C" __global__ void late(const int* from, int* to, int count) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (long long start = clock64(); clock64() - start < 60000;) {}
  if (threadIdx.x < count) to[threadIdx.x] = from[threadIdx.x];
}"""


@pytest.mark.gpu
@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (3000, 400), (400, 3000), (2**31 - 1, 700)])
def test_lengths_may_be_written_while_a_call_already_waits(parts, tmp_path, before, after):
    """What blocks have found from the lengths that stood there when they began is found again."""
    case = make_case([3000, 3000], [9, 33], 8, seed=3)
    (tmp_path / "late.cu").write_text(LATE)
    late = kernel(Build(str(tmp_path / "late.cu")), "late", case.q.device)
    new = torch.full_like(case.prefix_len, after)
    case.prefix_len.copy_(new)
    expected = attend(case)
    for _ in range(3):
        case.prefix_len.fill_(before)
        torch.cuda.synchronize()
        late.launch(1, 32, new, case.prefix_len, len(new))
        for found, right in zip(attend(case), expected, strict=True):
            assert torch.equal(found, right)


@pytest.mark.gpu
def test_a_captured_call_follows_the_lengths_on_the_device(parts):
    """Which blocks share which tile is found anew at every replay."""
    case = make_case([9000, 3000], [33, 9], 64, seed=2)
    attend(case)
    graph, lengths = torch.cuda.CUDAGraph(), case.prefix_len.clone()
    with torch.cuda.graph(graph):
        o, lse = attend(case)
    for scale in (0, 1, 3, 10):
        case.prefix_len.copy_(lengths * scale // 10)
        graph.replay()
        expected, expected_lse = attend(case)
        torch.testing.assert_close(o, expected, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-6)
