"""tree_build: every array of every tree as the CPU's heap gives it, ties, broken rows and cut pools included."""

from dataclasses import fields, replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels.tree_build import TreeArrays, tree_build, tree_build_cost, tree_build_fits, tree_build_impl
from kdlab.tree import build_best_first, check_tree
from tests.kernels.compare import guarded_allocations
from tests.tree.samples import draft, golden_cases, golden_input

gpu = pytest.mark.gpu
BUDGETS = (0, 1, 2, 7, 31, 63, 64, 255, 256, 257, 1023, 1024)
NAN, INF = float("nan"), float("inf")


def candidates(depth, width, *, seed=0, vocab=300):
    """One stream each of: peaked, flat, in between, all equal, quarter steps of nats, bf16 logits."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(6, depth, vocab, generator=generator)
    logits = noise * torch.tensor([1.0, 0.1, 3.0, 0.0, 3.0, 3.0]).view(6, 1, 1)
    logits[0, :, 0] += 9
    logits[5] = (logits[5] + 16).bfloat16().float()
    log_probs, ids = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    log_probs[4] = (log_probs[4] * 4).floor() / 4
    return log_probs[..., :width].contiguous(), ids[..., :width].contiguous()


def run(log_probs, token_ids, budget, **options):
    """The kernel's trees on the CPU; every array that it allocates stands between canaries."""
    log_probs, token_ids = log_probs.cuda(), token_ids.cuda()
    with guarded_allocations() as check:
        tree = build_best_first(log_probs, token_ids, budget, impl="cuda", **options)
    check()
    return tree.to("cpu")


def assert_same_tree(got, expected):
    """Equal in every bit, but for the last ones of a mass that is a sum of exponentials."""
    for field in fields(expected):
        ours, theirs = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "missed_mass":
            torch.testing.assert_close(ours, theirs, rtol=3e-7, atol=1e-13)
        elif isinstance(theirs, torch.Tensor):
            assert ours.shape == theirs.shape, field.name
            assert ours.dtype == theirs.dtype, field.name
            if theirs.dtype == torch.uint32:
                ours, theirs = ours.view(torch.int32), theirs.view(torch.int32)
            wrong = (ours != theirs).nonzero()
            assert not len(wrong), f"{field.name}: {len(wrong)} entries differ, first {wrong[0].tolist()}"
        else:
            assert ours == theirs, field.name


def assert_kernel_equals_heap(log_probs, token_ids, budget, **options):
    got = run(log_probs, token_ids, budget, **options)
    assert_same_tree(got, build_best_first(log_probs, token_ids, budget, impl="reference", **options))
    return got


def test_auto_on_the_cpu_is_the_heap():
    case = draft(2, 4, 8)
    assert_same_tree(build_best_first(*case, 20), build_best_first(*case, 20, impl="reference"))


@pytest.mark.parametrize(
    ("shape", "change", "error", "message"),
    [
        ((2, 3, 4), dict(budget=-1), ArgumentError, "budget"),
        ((2, 3, 4), dict(budget=True), ArgumentError, "budget"),
        ((2, 3, 4), dict(vocab_size=0), ArgumentError, "vocab_size"),
        ((2, 3), {}, ShapeError, "log_probs"),
        ((2, 3, 4), dict(token_ids=((2, 3, 5), torch.int32)), ShapeError, "token_ids"),
        ((2, 3, 4), dict(token_ids=((2, 3, 4), torch.float32)), ShapeError, "token_ids"),
        ((2, 3, 4), dict(log_probs=((2, 3, 4), torch.int32)), ShapeError, "log_probs"),
        ((2, 3, 4), dict(log_probs=((2, 3, 4), torch.float64)), NotSupported, "float64"),
        ((2, 32, 4), {}, NotSupported, "31 depths"),
        ((2, 3, 257), {}, NotSupported, "256 candidates"),
        ((2, 3, 4), dict(budget=1025), NotSupported, "1024 nodes"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(shape, change, error, message):
    arguments = dict(log_probs=(shape, torch.float32), token_ids=(shape, torch.int32), budget=4) | change
    with FakeTensorMode():
        for name in ("log_probs", "token_ids"):
            size, dtype = arguments[name]
            arguments[name] = torch.empty(size, dtype=dtype, device="cuda")
        with pytest.raises(error, match=message):
            tree_build(**arguments)


def test_devices_are_named():
    log_probs, token_ids = draft(2, 4, 8)
    with pytest.raises(UnsupportedDevice, match="on cpu"):
        tree_build(log_probs, token_ids, 4)
    with pytest.raises(UnsupportedDevice, match="on cpu"):
        build_best_first(log_probs, token_ids, 4, impl="cuda")
    with pytest.raises(ArgumentError, match="impl"):
        build_best_first(log_probs, token_ids, 4, impl="fast")


def test_what_is_too_large_is_left_to_the_heap():
    assert tree_build_fits(torch.zeros(1, 31, 256), 1024)
    for shape, budget in (((1, 32, 4), 4), ((1, 3, 257), 4), ((1, 3, 4), 1025)):
        assert not tree_build_fits(torch.zeros(shape), budget)
    assert not tree_build_fits(torch.zeros(1, 3, 4, dtype=torch.float64), 4)


def test_what_would_run_has_a_name():
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert tree_build_impl(31, 256, 1024, gpu) == "cuda"
    others = ((31, 256, 1024, cpu), (32, 256, 1024, gpu), (31, 257, 1024, gpu), (31, 256, 1025, gpu))
    assert {tree_build_impl(*sizes) for sizes in others} == {"reference"}


def test_fake_tensors():
    with FakeTensorMode():
        log_probs = torch.empty(3, 15, 64, device="cuda", dtype=torch.bfloat16)
        tree = tree_build(log_probs, log_probs.long(), 64)
    expected = build_best_first(*draft(3, 15, 64), 64)
    for name, array in tree._asdict().items():
        other = getattr(expected, name)
        assert (array.shape, array.dtype, array.device.type) == (other.shape, other.dtype, "cuda"), name


def test_cost():
    assert tree_build_cost(1, 15, 64, 64).bytes == 8 * 15 * 64 + 65 * (28 + 12) + 60 + 9
    assert tree_build_cost(8, 15, 64, 64).bytes == 8 * tree_build_cost(1, 15, 64, 64).bytes


@pytest.mark.parametrize("name", TreeArrays._fields)
def test_the_comparison_sees_one_changed_entry(name):
    tree = build_best_first(*draft(2, 4, 8), 20)
    changed = getattr(tree, name).clone()
    flat = changed.view(torch.int32 if changed.dtype == torch.uint32 else changed.dtype).view(-1)
    flat[-1] = ~flat[-1] if changed.dtype == torch.bool else flat[-1] + 1
    with pytest.raises(AssertionError):
        assert_same_tree(replace(tree, **{name: changed}), tree)


@gpu
@pytest.mark.parametrize("budget", BUDGETS)
def test_kernel_equals_heap_on_a_thousand_streams(budget):
    shapes = [(depth, width) for depth in (1, 7, 15, 31) for width in (1, 2, 16, 64, 256)]
    for seed, (depth, width) in enumerate(shapes[:: 1 if budget < 1000 else 2]):
        case = candidates(depth, width, seed=1000 * budget + seed)
        assert_kernel_equals_heap(*case, budget)


@gpu
@pytest.mark.parametrize("budget", [5, 64, 200, 600])
def test_broken_rows_infinities_and_unsorted_rows(budget):
    generator = torch.Generator().manual_seed(budget)
    for seed in range(12):
        depth, width = (1, 3, 15, 31)[seed % 4], (1, 5, 64, 200)[seed // 3]
        log_probs, token_ids = candidates(depth, width, seed=seed)
        for value in (NAN, INF, -INF, -INF, -1e30, 5e-5):
            place = [int(torch.randint(size, (), generator=generator)) for size in log_probs.shape]
            log_probs[tuple(place)] = value
        log_probs[0, depth // 2] = -INF
        log_probs[1, :, width // 2 :] = -INF
        if seed % 2:
            order = torch.rand(log_probs.shape, generator=generator).argsort(-1)
            log_probs, token_ids = log_probs.gather(-1, order), token_ids.gather(-1, order)
        assert_kernel_equals_heap(log_probs, token_ids, budget)


@gpu
@pytest.mark.parametrize("budget", [16, 64, 200, 1024])
@pytest.mark.parametrize("width", [2, 64])
def test_certain_rows_and_far_tails_fill_the_pool(budget, width):
    log_probs, token_ids = candidates(15, width, seed=budget)
    log_probs[0] = 0.0  # every tuple of ranks scores 0: only the tie rule is left
    log_probs[1, :, width // 2 :] = -3e30  # all others fall into one bin
    log_probs[2] -= torch.linspace(0, 1e-6, width)
    log_probs[3, :, 0] = 0.0
    tree = assert_kernel_equals_heap(log_probs, token_ids, budget)
    check_tree(tree)


@gpu
@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: str(case["case"]))
def test_golden_trees(case):
    log_probs, token_ids = golden_input(case)
    if not tree_build_fits(log_probs, case["budget"]):
        pytest.skip("more candidates than the kernel takes")
    assert_kernel_equals_heap(log_probs, token_ids, case["budget"], vocab_size=case["vocab"])


@gpu
def test_vocabulary_known_guessed_and_too_narrow():
    log_probs, token_ids = draft(3, 4, 16, vocab=16)
    token_ids[1, 2, 3] = 99
    log_probs[2] -= 0.5
    for budget, vocab_size in ((15, None), (16, None), (17, None), (40, None), (40, 100), (40, 200), (16, 16 + 84)):
        assert_kernel_equals_heap(log_probs, token_ids, budget, vocab_size=vocab_size)
    assert run(log_probs, token_ids, 40).truncated.tolist() == [False, True, True]
    assert run(log_probs[:, :0], token_ids[:, :0], 40).truncated.tolist() == [False] * 3
    assert_kernel_equals_heap(log_probs[..., :0], token_ids[..., :0], 7)
    assert_kernel_equals_heap(log_probs[:0], token_ids[:0], 7)


@gpu
def test_what_the_heap_refuses_ends_the_tree():
    log_probs, token_ids = draft(4, 5, 8)
    whole = build_best_first(log_probs, token_ids, 30)
    log_probs[0, 2, 0] = 1e-3
    token_ids[1, 3, 7] = -5
    token_ids[2, 1, 7] = 64
    tree = run(log_probs, token_ids, 30, vocab_size=64)
    assert tree.nonfinite_rows.tolist() == [1, 1, 1, 0]
    assert [int(depth.max()) for depth in tree.depth[:3]] == [2, 3, 1]
    assert torch.equal(tree.token[3], whole.token[3])
    check_tree(tree)
    wide = token_ids.long()
    wide[1, 3, 7] = 2**32 + 5
    wide[2, 1, 7] = 9
    assert run(log_probs, wide, 30).nonfinite_rows.tolist() == [1, 1, 0, 0]


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_strides(dtype):
    log_probs, token_ids = (t.mT.contiguous().mT for t in draft(2, 8, 12))
    assert_kernel_equals_heap(log_probs.to(dtype), token_ids, 40)


@gpu
def test_streams_do_not_touch_each_other():
    log_probs, token_ids = candidates(15, 64, seed=5)
    log_probs[2, 3, 9] = NAN
    batch = run(log_probs.repeat(3, 1, 1), token_ids.repeat(3, 1, 1), 100)
    for stream in range(6):
        alone = run(log_probs[stream : stream + 1], token_ids[stream : stream + 1], 100)
        for copy in range(3):
            assert_same_tree(batch.stream(stream + 6 * copy), alone.stream(0))


@gpu
def test_capture_replays_with_new_candidates():
    log_probs, token_ids = (t.cuda() for t in candidates(15, 64, seed=1))
    build_best_first(log_probs, token_ids, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree = build_best_first(log_probs, token_ids, 64)
    for seed in (1, 2, 3):
        case = candidates(15, 64, seed=seed)
        log_probs.copy_(case[0])
        token_ids.copy_(case[1])
        graph.replay()
        assert_same_tree(tree.to("cpu"), build_best_first(*case, 64))


@gpu
def test_opcheck():
    log_probs, token_ids = (t.cuda() for t in draft(2, 5, 8))
    arguments = (log_probs, token_ids.int(), 12, 2**31 - 1, -1)
    torch.library.opcheck(torch.ops.kdlab.tree_build.default, arguments)
