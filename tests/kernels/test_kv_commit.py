"""kv_commit: rows move behind the prefix in all layers and nothing else changes; tapped rows follow the path."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, ShapeError, UnsupportedDevice
from kdlab.kernels.kv_commit import kv_commit, kv_commit_cost
from tests.kernels.compare import canary, guarded_allocations

gpu = pytest.mark.gpu
PATHS = ([0, 2, 3], [0, 2, 3, 4], [0, 5], [0, 1, 4, 9], [0, 1, 2, 3], [0], [], list(range(16)), list(range(0, 32, 2)))
PATHS = (*PATHS, [0, 15, 14, 13, 1, 2, 3], [0, 2, 1])  # no tree has these, but a copy with overlap must bear them


def padded(paths, length):
    path = torch.full((len(paths), length), -1, dtype=torch.int32)
    for stream, rows in enumerate(paths):
        path[stream, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
    return path


def new_case(paths, prefixes, *, layers=3, width=576, dtype=torch.bfloat16, length=16, features=None, rows=33):
    """Arguments of kv_commit on the CPU, pages in an order that no stream would guess."""
    generator = torch.Generator().manual_seed(len(paths) + width)
    table_width = -(-(max(prefixes) + rows) // 64) + 1
    table = torch.randperm(len(paths) * table_width, generator=generator).int().view(len(paths), table_width)
    pages = torch.randn(layers, table.numel() + 1, 64, width, generator=generator).to(dtype)
    prefix = torch.tensor(prefixes, dtype=torch.int32)
    taps = None if features is None else torch.randn(len(paths), rows, features, generator=generator).to(dtype)
    return pages, table, prefix, padded(paths, length), taps


def committed(pages, table, prefix, path):
    """The oracle: one row at a time, from a copy."""
    out = pages.clone()
    for stream, rows in enumerate(path.tolist()):
        for depth, row in enumerate(rows):
            if depth and row >= 0:
                (to_page, to), (page, at) = (divmod(int(prefix[stream]) + i, 64) for i in (depth, row))
                out[:, table[stream, to_page], to] = pages[:, table[stream, page], at]
    return out


def one_after_the_other(pages, table, prefix, path):
    """The broken twin: in place, deepest first, so that a row is lost when it is read after it was written."""
    out = pages.clone()
    for depth in reversed(range(path.shape[1])):
        only = torch.full_like(path, -1)
        only[:, depth] = path[:, depth]
        out = committed(out, table, prefix, only)
    return out


def assert_same_bytes(got, expected):
    assert torch.equal(got.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))


def gathered(taps, path):
    out = taps.new_zeros(path.shape[0], path.shape[1], taps.shape[2])
    for stream, rows in enumerate(path.tolist()):
        for depth, row in enumerate(rows):
            if row >= 0:
                out[stream, depth] = taps[stream, row]
    return out


def run_on_gpu(pages, table, prefix, path, taps=None):
    """The kernel's pages and gathered taps, every buffer between canaries."""
    inside, check = canary(pages.shape, pages.dtype, "cuda")
    inside.copy_(pages)
    others = [None if t is None else t.cuda() for t in (table, prefix, path, taps)]
    with guarded_allocations() as check_all:
        out = kv_commit(inside, *others[:3], taps=[tap for tap in others[3:] if tap is not None])
    check()
    if taps is not None:
        check_all()
    return inside, out


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_auto_on_the_cpu_is_the_reference(path):
    pages, table, prefix, path, taps = new_case([path, [0, 3], []], [62, 0, 7], features=40)
    expected = committed(pages, table, prefix, path)
    out = kv_commit(pages, table, prefix, path, taps=[taps])
    assert_same_bytes(pages, expected)
    assert_same_bytes(out, gathered(taps, path))


def test_the_reference_off_the_cpu_has_no_length_that_only_the_host_knows():
    """Else no graph could hold it; tensors without values refuse an index by a mask."""
    pages, table, prefix, path, taps = (tensor.to("meta") for tensor in new_case([[0, 2, 3], []], [62, 0], features=40))
    out = kv_commit(pages, table, prefix, path, taps=[taps], impl="reference")
    assert (out.shape, out.device.type) == ((2, 16, 40), "meta")


@gpu
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_the_reference_on_a_gpu(path):
    pages, table, prefix, path, _ = new_case([path, [0, 3], []], [62, 0, 7])
    inside = pages.cuda()
    kv_commit(inside, table.cuda(), prefix.cuda(), path.cuda(), impl="reference")
    assert_same_bytes(inside, committed(pages, table, prefix, path))


def test_no_taps_give_none():
    assert kv_commit(*new_case([[0, 2]], [3])[:4]) is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(pages=torch.zeros(3, 8, 32, 16)), ShapeError, "pages"),
        (dict(pages=torch.zeros(3, 8, 64, 32)[..., ::2]), ShapeError, "contiguous"),
        (dict(block_table=torch.zeros(3, 2, dtype=torch.int32)), ShapeError, "prefix_len"),
        (dict(prefix_len=torch.zeros(2, 1, dtype=torch.int32)), ShapeError, "prefix_len"),
        (dict(path=torch.zeros(3, 4, dtype=torch.int32)), ShapeError, "path"),
        (dict(path=torch.full((2, 0), -1, dtype=torch.int32)), ArgumentError, "at least 1"),
        (dict(path=torch.full((2, 1026), -1, dtype=torch.int32)), ArgumentError, "at most 1025"),
        (dict(path=padded([[0, 500], []], 4)), ArgumentError, "cache rows"),
        (dict(block_table=torch.full((2, 2), 8, dtype=torch.int32)), ArgumentError, "block_table: .* to 447, got 517"),
        (dict(block_table=torch.full((2, 2), -1, dtype=torch.int32)), ArgumentError, "block_table: .* got -59"),
        (dict(taps=[torch.zeros(3, 4, 4)]), ShapeError, "taps"),
        (dict(taps=[torch.zeros(2, 4, 4), torch.zeros(2, 4, 3)]), ShapeError, r"taps\[1\]"),
        (dict(taps=[torch.zeros(2, 4, 4), torch.zeros(2, 4, 4).half()]), ShapeError, "as the first"),
        (dict(taps=[torch.zeros(2, 4, 4)] * 9), ArgumentError, "at most 8"),
        (dict(taps=torch.zeros(3, 2, 4, 4)), ArgumentError, "taps: expected a list or tuple of tensors, got Tensor"),
        (dict(taps=None), ArgumentError, "taps: expected a list or tuple of tensors, got NoneType"),
        (dict(path=torch.full((2, 4), -1, dtype=torch.int32, device="meta")), ShapeError, "on cpu"),
        (dict(impl="fast"), ArgumentError, "impl"),
        (dict(impl="cuda"), UnsupportedDevice, "cpu"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change, error, message):
    pages, table, prefix, path, _ = new_case([[0, 2], [0]], [3, 70], width=16)
    arguments = dict(pages=pages, block_table=table, prefix_len=prefix, path=path)
    before = pages.clone()
    with pytest.raises(error, match=message):
        kv_commit(**(arguments | change))
    assert torch.equal(pages, before)


def test_fake_tensors():
    with FakeTensorMode():
        on_gpu = dict(device="cuda", dtype=torch.int32)
        pages = torch.empty(3, 8, 64, 576, dtype=torch.bfloat16, device="cuda")
        table, prefix, path = (torch.empty(*shape, **on_gpu) for shape in ((2, 4), (2,), (2, 8)))
        taps = torch.empty(2, 33, 96, dtype=torch.float16, device="cuda")
        out = kv_commit(pages, table, prefix, path, taps=[taps] * 3)
        assert (out.shape, out.dtype, out.device.type) == ((2, 8, 288), torch.float16, "cuda")
        assert kv_commit(pages, table, prefix, path) is None
        with pytest.raises(ShapeError, match="path: expected contiguous int32"):
            kv_commit(pages, table, prefix, path.long())


def test_cost():
    assert kv_commit_cost(61, 1152, 7).bytes == 2 * 61 * 1152 * 7
    assert kv_commit_cost(61, 1152, 7, tap_bytes=14336, gathered=8).bytes == 2 * (61 * 1152 * 7 + 14336 * 8)


def test_the_oracle_tells_a_copy_in_place_and_a_missing_move():
    pages, table, prefix, path, _ = new_case([[0, 2, 3]], [62])
    expected = committed(pages, table, prefix, path)
    for wrong in (pages, one_after_the_other(pages, table, prefix, path)):
        with pytest.raises(AssertionError):
            assert_same_bytes(wrong, expected)


@gpu
@pytest.mark.parametrize("prefix", [0, 60, 64])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_kernel_moves_the_path_and_nothing_else(path, prefix):
    case = new_case([path, [0, 3], [], [0, 2, 3]], [prefix, 7, 5, 62], features=392)
    got, out = run_on_gpu(*case)
    assert_same_bytes(got, committed(*case[:4]))
    assert_same_bytes(out, gathered(case[4], case[3]))


@gpu
@pytest.mark.parametrize("length", [1, 2, 4, 8, 9, 16, 17, 32, 33, 65, 257, 513, 600, 1025])
def test_every_path_length(length):
    rows = 2 * length
    case = new_case([list(range(0, rows, 2)), [0]], [61, 0], length=length, rows=rows + 1, layers=2, features=24)
    got, out = run_on_gpu(*case)
    assert_same_bytes(got, committed(*case[:4]))
    assert_same_bytes(out, gathered(case[4], case[3]))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize(("width", "features"), [(576, 512), (8, 8), (32, 4), (4, 7), (5, 3), (1, 1), (1234, 1030)])
def test_every_row_width_and_dtype(dtype, width, features):
    case = new_case([[0, 2, 3, 7], [0, 1, 9]], [63, 1], width=width, dtype=dtype, length=8, features=features)
    got, out = run_on_gpu(*case)
    assert_same_bytes(got, committed(*case[:4]))
    assert_same_bytes(out, gathered(case[4], case[3]))


@gpu
def test_wide_taps_and_a_view_of_them():
    case = new_case([[0, 2, 3], [0]], [0, 1], layers=1, features=43008)
    _, out = run_on_gpu(*case)
    assert_same_bytes(out, gathered(case[4], case[3]))
    pages, table, prefix, path, taps = (t.cuda() for t in case)
    view = taps[..., 1:1001]
    assert_same_bytes(kv_commit(pages, table, prefix, path, taps=[view]), out[..., 1:1001].contiguous())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("count", [2, 6, 8])
@pytest.mark.parametrize("features", [8, 24, 7168])
def test_several_taps_come_side_by_side(features, count, device):
    case = new_case([[0, 2, 3], [0], []], [0, 1, 7], layers=1, features=count * features)
    pages, table, prefix, path, taps = (t.to(device) for t in case)
    out = kv_commit(pages, table, prefix, path, taps=taps.split(features, dim=-1))
    assert_same_bytes(out, gathered(case[4], case[3]))
    other = kv_commit(pages, table, prefix, path, taps=taps.split(features, dim=-1)[::-1])
    assert not torch.equal(other, out)


@gpu
@pytest.mark.parametrize("fault", ["row", "page", "far page", "prefix", "negative prefix", "int32 overflow"])
def test_a_malformed_stream_stays_as_it_was_and_the_others_move(fault):
    pages, table, prefix, path, taps = new_case([[0, 2, 3], [0, 1, 3], [0, 4]], [62, 9, 60], features=16)
    good = path.clone()
    good[1] = -1
    expected = committed(pages, table, prefix, good)
    bad_table, bad_prefix, bad_path = table.clone(), prefix.clone(), path.clone()
    if fault == "row":
        bad_path[1, 2] = 10_000
    elif fault == "page":
        bad_table[1, 0] = -1
    elif fault == "far page":
        bad_table[1, 0] = pages.shape[1]
    elif fault == "int32 overflow":
        bad_path[1, 2], bad_prefix[1] = 2**31 - 1, 2**31 - 1
    else:
        bad_prefix[1] = 64 * table.shape[1] - 2 if fault == "prefix" else -1
    got, out = run_on_gpu(pages, bad_table, bad_prefix, bad_path, taps)
    assert_same_bytes(got, expected)
    assert_same_bytes(out[0], gathered(taps, path)[0])


@gpu
def test_capture_replays_with_new_paths():
    pages, table, prefix, path, taps = (t.cuda() for t in new_case([[0, 2, 3], [0, 1]], [62, 3], features=64))
    before = pages.clone()
    kv_commit(pages.clone(), table, prefix, path, taps=[taps])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kv_commit(pages, table, prefix, path, taps=[taps])
    for rows in ([[0, 2, 3], [0, 1]], [[0, 4, 9, 12], []]):
        pages.copy_(before)
        path.copy_(padded(rows, 16))
        graph.replay()
        assert_same_bytes(pages, committed(before.cpu(), table.cpu(), prefix.cpu(), path.cpu()))
        assert_same_bytes(out, gathered(taps.cpu(), path.cpu()))


@gpu
def test_opcheck():
    pages, table, prefix, path, taps = (t.cuda() for t in new_case([[0, 2, 3], [0, 1]], [62, 3], features=64))
    out = taps.new_empty(2, 16, 64)
    torch.library.opcheck(torch.ops.kdlab.kv_commit.default, (pages, table, prefix, path, [taps], out))
    torch.library.opcheck(torch.ops.kdlab.kv_commit.default, (pages, table, prefix, path, [], None))
