"""tree_accept: paths and status codes as the CPU gives them, for good trees and for arrays that hold anything."""

import random
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels.tree_accept import AcceptArrays, tree_accept, tree_accept_cost, tree_accept_impl
from kdlab.tree import AcceptStatus, DraftTree, accept, build_best_first, build_root_only
from tests.kernels.compare import guarded_allocations
from tests.tree.samples import draft, sample_tree
from tests.tree.test_accept import MALFORMED, likely_target

gpu = pytest.mark.gpu
LINKS = ("token", "parent", "depth", "first_child", "next_sibling")
INT_MAX = 2**31 - 1


def run(tree, target):
    """The kernel's result on the CPU; every array that it allocates stands between canaries."""
    tree, target = tree.to("cuda"), target.cuda()
    with guarded_allocations() as check:
        result = accept(tree, target, impl="cuda")
    check()
    return AcceptArrays(*(getattr(result, name).cpu() for name in AcceptArrays._fields))


def assert_same(got, expected):
    for name in AcceptArrays._fields:
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype == torch.int32, name
        assert torch.equal(ours, theirs), f"{name}: {ours.tolist()}, not {theirs.tolist()}"


def assert_kernel_equals_torch(tree, target):
    expected = accept(tree, target, impl="reference")
    assert_same(run(tree, target), expected)
    return expected


def star(num_rows, depth_limit=3):
    """All draft rows under the root, token = row."""
    tree = DraftTree.from_parents(list(range(num_rows)), [-1] + [0] * (num_rows - 1))
    return replace(tree, depth_limit=depth_limit, missed_mass=torch.zeros(1, depth_limit))


def arguments(streams=2, rows=9, **change):
    """Fake tensors as tree_accept takes them."""
    made = {name: torch.empty(streams, rows, dtype=torch.int32, device="cuda") for name in (*LINKS, "target_tokens")}
    made["num_nodes"] = torch.empty(streams, dtype=torch.int32, device="cuda")
    return made | {"depth_limit": 3} | change


def test_auto_on_the_cpu_is_torch():
    tree, target = sample_tree(), torch.randint(0, 64, (2, 21))
    assert_same(accept(tree, target), accept(tree, target, impl="reference"))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "error"),
    [
        ("token", (2, 1026), torch.int32, NotSupported),
        ("token", (2, 0), torch.int32, NotSupported),
        ("token", (2,), torch.int32, ShapeError),
        ("parent", (2, 8), torch.int32, ShapeError),
        ("depth", (2, 9), torch.int64, ShapeError),
        ("num_nodes", (3,), torch.int32, ShapeError),
        ("target_tokens", (2, 8), torch.int32, ShapeError),
        ("target_tokens", (2, 9), torch.float32, ShapeError),
    ],
)
def test_wrong_arguments_are_named(name, shape, dtype, error):
    with FakeTensorMode(), pytest.raises(error, match=name):
        tree_accept(**arguments(**{name: torch.empty(shape, dtype=dtype, device="cuda")}))


def test_devices_and_choices_are_named():
    tree, target = sample_tree(), torch.zeros(2, 21, dtype=torch.int32)
    with pytest.raises(UnsupportedDevice, match="on cpu"):
        accept(tree, target, impl="cuda")
    with pytest.raises(ArgumentError, match="impl"):
        accept(tree, target, impl="fast")
    with FakeTensorMode(), pytest.raises(ArgumentError, match="depth_limit"):
        tree_accept(**arguments(depth_limit=2**31 - 1))
    with FakeTensorMode(), pytest.raises(ShapeError, match="depth: expected on cuda"):
        tree_accept(**arguments(depth=torch.empty(2, 9, dtype=torch.int32)))


def test_what_would_run_has_a_name():
    sizes = (0, 1, 1025, 1026)
    assert [tree_accept_impl(n, torch.device("cuda")) for n in sizes] == ["reference", "cuda", "cuda", "reference"]
    assert tree_accept_impl(9, torch.device("cpu")) == "reference"


def test_fake_tensors():
    with FakeTensorMode():
        result = tree_accept(**arguments(streams=5, target_tokens=torch.empty(5, 9, dtype=torch.int64, device="cuda")))
    assert [tuple(array.shape) for array in result] == [(5, 4), (5,), (5,), (5,)]
    assert {(array.dtype, array.device.type) for array in result} == {(torch.int32, "cuda")}


def test_cost():
    assert tree_accept_cost(8, 65, 15).bytes == 8 * (24 * 65 + 4 + 64 + 12)


@pytest.mark.parametrize("name", AcceptArrays._fields)
def test_the_comparison_sees_one_changed_entry(name):
    result = accept(sample_tree(), torch.zeros(2, 21, dtype=torch.int32))
    changed = getattr(result, name).clone()
    changed.view(-1)[-1] += 1
    with pytest.raises(AssertionError, match=name):
        assert_same(replace(result, **{name: changed}), result)


@gpu
@pytest.mark.parametrize("budget", [0, 1, 2, 30, 31, 32, 63, 64, 255, 1023, 1024])
def test_walks_down_good_trees(budget):
    generator, deepest = random.Random(budget), 0
    for depth, width in ((1, 64), (7, 12), (15, 40), (31, 3)):
        log_probs, token_ids = draft(8, depth, width, seed=budget)
        log_probs[3, -1] = float("nan")
        tree = build_best_first(log_probs, token_ids, budget)
        target = torch.tensor(likely_target(tree, generator))
        target[5] = torch.where(torch.rand(budget + 1) < 0.3, -7, target[5])
        result = assert_kernel_equals_torch(tree, target.int())
        assert result.status.tolist() == [0] * 8
        deepest = max(deepest, int(result.length.max()))
    assert deepest >= min(budget, 1), "the walks must go down"


@gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_targets_of_any_width_are_walked(dtype):
    tree = sample_tree()
    target = torch.tensor(likely_target(tree, random.Random(0)))
    result = assert_kernel_equals_torch(tree, target.to(dtype))
    assert result.length.min() > 0


@gpu
@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("stream", [0, 2])
def test_a_malformed_tree_gets_its_status_and_leaves_the_others_alone(case, stream):
    field, node, value, status = MALFORMED[case]
    row = ([9, 1, 2, 1, 2, -1], [-1, 0, 0, 1, 1, -1])
    tree = DraftTree.from_parents(*([part] * 3 for part in row))
    changed = getattr(tree, field).clone()
    changed[stream, node] = value
    target = torch.tensor([[1, 2, 0, 0, 6, 0]] * 3)
    result = assert_kernel_equals_torch(replace(tree, **{field: changed}), target)
    assert result.status.tolist() == [int(status) if s == stream else 0 for s in range(3)]


@gpu
@pytest.mark.parametrize("count", [0, -1, 22, INT_MAX, -INT_MAX - 1])
def test_sizes_that_cannot_be(count):
    tree = replace(sample_tree(), num_nodes=torch.tensor([21, count], dtype=torch.int32))
    result = assert_kernel_equals_torch(tree, torch.zeros(2, 21, dtype=torch.int64))
    assert result.status.tolist() == [0, AcceptStatus.BAD_SIZE]


@gpu
def test_two_thousand_trees_with_faults_anywhere():
    generator, met = random.Random(0), set()
    for seed in range(10):
        budget = (2, 7, 20, 63, 64)[seed % 5]
        tree = build_best_first(*draft(200, 1 + seed, 6, seed=seed), budget)
        target = torch.tensor(likely_target(tree, generator))
        arrays = {name: getattr(tree, name).clone() for name in (*LINKS, "num_nodes")}
        for stream in range(200):
            for _ in range(generator.choice((0, 1, 1, 1, 2, 4))):
                name = generator.choice(LINKS) if generator.random() < 0.95 else "num_nodes"
                near = generator.randrange(-3, budget + 3)
                value = generator.choice((near, near, near, 0, -1, INT_MAX, -INT_MAX - 1))
                if name == "num_nodes":
                    arrays[name][stream] = value
                else:
                    arrays[name][stream, generator.randrange(budget + 1)] = value
            if generator.random() < 0.2:  # twins, with all links right
                row = generator.randrange(budget + 1)
                twin = int(tree.next_sibling[stream, row])
                if twin > 0:
                    arrays["token"][stream, row] = arrays["token"][stream, twin]
        result = assert_kernel_equals_torch(replace(tree, **arrays), target)
        met |= set(result.status.tolist())
    assert met == set(map(int, AcceptStatus))


@gpu
def test_random_arrays():
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 2, 33, 65, 1025):
        shape = (64, rows)
        low, high = -2, rows + 2
        links = {n: torch.randint(low, high, shape, generator=generator, dtype=torch.int32) for n in LINKS}
        links["num_nodes"] = torch.randint(low, high, (64,), generator=generator, dtype=torch.int32)
        tree = replace(build_root_only(64), **links)
        for depth_limit in (0, 5, 2000):
            target = torch.randint(low, high, shape, generator=generator)
            assert_kernel_equals_torch(replace(tree, depth_limit=depth_limit), target)


@gpu
@pytest.mark.parametrize("rows", [2, 64, 65, 1024, 1025])
def test_stars_chains_and_twins(rows):
    tree, target = star(rows), torch.zeros(1, rows, dtype=torch.int32)
    target[0, 0] = rows - 1
    assert assert_kernel_equals_torch(tree, target).path[0, :2].tolist() == [0, rows - 1]
    far = torch.arange(rows, dtype=torch.int32).unsqueeze(0) << 20  # tokens that a plain hash puts into few places
    for tokens in (tree.token, far):
        assert assert_kernel_equals_torch(replace(tree, token=tokens), target).status.tolist() == [0]
        for first, second in ((1, rows - 1), (rows // 2, rows // 2 + 1)):
            if first < second < rows:
                token = tokens.clone()
                token[0, second] = token[0, first]
                result = assert_kernel_equals_torch(replace(tree, token=token), target)
                assert result.status.tolist() == [AcceptStatus.DUPLICATE_CHILD]
    chain = DraftTree.from_parents([0] * rows, [-1, *range(rows - 1)])
    result = assert_kernel_equals_torch(chain, torch.zeros(1, rows, dtype=torch.int32))
    assert result.length.tolist() == [rows - 1]


@gpu
def test_streams_equal_their_single_runs():
    tree = build_best_first(*draft(6, 7, 12, seed=3), 64)
    target = torch.tensor(likely_target(tree, random.Random(1)))
    parent = tree.parent.clone()
    parent[4, 9] = 9
    batch = run(replace(tree, parent=parent), target)
    for stream in range(6):
        one = {name: getattr(tree, name)[stream : stream + 1] for name in (*LINKS, "num_nodes")}
        one["parent"] = parent[stream : stream + 1]
        alone = run(replace(tree, **one), target[stream : stream + 1])
        for name in AcceptArrays._fields:
            assert torch.equal(getattr(alone, name)[0], getattr(batch, name)[stream])


@gpu
def test_wide_targets_are_cut_to_32_bits():
    tree = DraftTree.from_parents([9, 1, 2], [-1, 0, 1])
    target = torch.tensor([[1, 2, -(2**40)]])
    assert run(tree, target).bonus.tolist() == [-1]
    assert run(tree, target + 2**33 - 1).length.tolist() == [0]


@gpu
def test_capture_replays_with_new_trees():
    cases = [build_best_first(*draft(4, 7, 12, seed=seed), 64) for seed in range(3)]
    targets = [torch.tensor(likely_target(tree, random.Random(7))).int() for tree in cases]
    tree, target = cases[0].to("cuda"), targets[0].cuda()
    accept(tree, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = accept(tree, target)
    for case, wanted in zip(cases, targets, strict=True):
        for name in (*LINKS, "num_nodes"):
            getattr(tree, name).copy_(getattr(case, name))
        target.copy_(wanted)
        graph.replay()
        got = AcceptArrays(*(getattr(result, name).cpu() for name in AcceptArrays._fields))
        assert_same(got, accept(case, wanted))


@gpu
def test_opcheck():
    tree = sample_tree().to("cuda")
    arrays = [getattr(tree, name) for name in (*LINKS, "num_nodes")]
    target = torch.zeros(2, 21, dtype=torch.int32, device="cuda")
    torch.library.opcheck(torch.ops.kdlab.tree_accept.default, (*arrays, target, 4))
