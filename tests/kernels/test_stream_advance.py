"""stream_advance: the kernel against plain torch, on good rounds and on arrays that hold anything."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, ShapeError, UnsupportedDevice
from kdlab.kernels.stream_advance import NO_STOP, stream_advance, stream_advance_cost
from tests.kernels.compare import guarded_allocations

gpu = pytest.mark.gpu
STATE = ("start", "anchor", "running", "num_tokens", "stop")


def new_case(streams=7, rows=12, depth=5, vocab=9, seed=0, tail=0, device="cpu"):
    """Paths of every length, streams at rest, failed rounds, tokens that stop before, at and behind the cap."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    length = draw(0, depth + 1, streams)
    places = torch.arange(depth + 1)
    path = torch.where(places <= length[:, None], draw(0, rows, streams, depth + 1), -1)
    num_tokens = draw(1, 30, streams)
    case = dict(
        token=draw(0, vocab, streams, rows),
        path=path.int(),
        length=length,
        bonus=torch.where(draw(0, 6, streams) == 0, -1, draw(0, vocab, streams)),
        status=torch.where(draw(0, 6, streams) == 0, 3, 0).int(),
        is_stop=torch.rand(vocab, generator=generator) < 0.25,
        cap=num_tokens + draw(1, 8, streams),
        start=draw(0, 1000, streams),
        anchor=draw(0, vocab, streams),
        running=(draw(0, 5, streams) > 0).int(),
        num_tokens=num_tokens,
        stop=torch.where(draw(0, 3, streams) == 0, draw(0, 5, streams), NO_STOP).int(),
    )
    return {name: tensor.to(device) for name, tensor in case.items()} | {"tail": tail}


def run(case, impl):
    """Return what comes out and what was written, on the CPU."""
    device = "cpu" if impl == "reference" else "cuda"
    case = {name: value.to(device, copy=True) if name != "tail" else value for name, value in case.items()}
    return on_cpu(stream_advance(**case, impl=impl), case)


def on_cpu(out, case):
    written = {name: case[name] for name in STATE}
    found = {"before": out.start, "path": out.path, "num_rows": out.num_rows} | written
    return {name: value.cpu() for name, value in found.items()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == torch.int32
        assert torch.equal(ours[name], value), name


def test_a_stream_by_hand():
    numbers = dict(length=[1, 1, 0], bonus=[4, 2, -1], status=[0, 0, 0], cap=[9, 9, 9], start=[50, 60, 70])
    numbers |= dict(anchor=[1, 1, 1], running=[1, 0, 1], num_tokens=[3, 3, 3], stop=[NO_STOP] * 3)
    case = {name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()}
    case["token"] = torch.tensor([[1, 2, 3]] * 3, dtype=torch.int32)
    case["path"] = torch.tensor([[0, 2, -1]] * 3, dtype=torch.int32)
    case["is_stop"] = torch.arange(5) == 3
    out = stream_advance(**case, tail=0)
    assert out.start.tolist() == [50, 60, 70]
    assert out.path.tolist() == [[0, 2, -1], [-1] * 3, [-1] * 3]
    assert out.num_rows.tolist() == [2, 0, 0]
    assert case["start"].tolist() == [52, 60, 70]
    assert case["anchor"].tolist() == [4, 1, 1]
    assert case["num_tokens"].tolist() == [5, 3, 3]
    assert case["stop"].tolist() == [3, NO_STOP, NO_STOP]
    assert case["running"].tolist() == [0, 0, 0]


@gpu
@pytest.mark.parametrize("tail", [0, 1, 9])
@pytest.mark.parametrize("depth", [0, 1, 5, 31, 32, 70])
def test_the_kernel_is_the_reference(depth, tail):
    for seed in range(8):
        case = new_case(streams=33, depth=depth, seed=seed, tail=tail)
        with guarded_allocations() as check:
            ours = run(case, "cuda")
        check()
        assert_same(ours, run(case, "reference"))


@gpu
def test_rows_and_tokens_that_lead_nowhere_stop_nothing():
    case = new_case(streams=4, depth=3, seed=1) | {"is_stop": torch.ones(9, dtype=torch.bool)}
    for name, value in dict(running=1, status=0, length=2, cap=1000, stop=NO_STOP).items():
        case[name].fill_(value)
    case["bonus"].copy_(torch.tensor([9, 2**31 - 1, 9, 9]))
    case["path"].copy_(torch.tensor([[0, 12, -7, -1], [0, -1, -1, -1], [0, 2**31 - 1, -(2**31), -1], [0, 3, 4, -1]]))
    ours, theirs = run(case, "cuda"), run(case, "reference")
    assert_same(ours, theirs)
    assert ours["stop"].tolist() == [NO_STOP] * 3 + [int(case["num_tokens"][3])]


@gpu
def test_capture_replays_with_new_rounds():
    cases = [new_case(seed=seed) for seed in range(3)]
    buffers = {name: value.cuda() if name != "tail" else value for name, value in cases[0].items()}
    stream_advance(**buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = stream_advance(**buffers)
    for case in cases:
        for name, value in case.items():
            if name != "tail":
                buffers[name].copy_(value)
        graph.replay()
        assert_same(on_cpu(out, buffers), run(case, "reference"))


@pytest.mark.parametrize("name", ["before", "path", "num_rows", *STATE])
def test_the_comparison_sees_one_changed_entry(name):
    theirs = run(new_case(), "reference")
    ours = {key: value.clone() for key, value in theirs.items()}
    ours[name].view(-1)[0] += 1
    with pytest.raises(AssertionError, match=name):
        assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token", torch.zeros(7, dtype=torch.int32)),
        ("path", torch.zeros(6, 6, dtype=torch.int32)),
        ("length", torch.zeros(7, dtype=torch.int64)),
        ("is_stop", torch.zeros(9, dtype=torch.int32)),
        ("running", torch.zeros(7, dtype=torch.bool)),
        ("start", torch.zeros(14, dtype=torch.int32)[::2]),
        ("cap", torch.zeros(8, dtype=torch.int32)),
    ],
)
def test_wrong_arguments_are_named(name, value):
    with pytest.raises(ShapeError, match=name):
        stream_advance(**(new_case() | {name: value}))


def test_devices_and_choices_are_named():
    with pytest.raises(UnsupportedDevice, match="on cpu"):
        stream_advance(**new_case(), impl="cuda")
    with pytest.raises(ArgumentError, match="impl"):
        stream_advance(**new_case(), impl="fast")
    with pytest.raises(ArgumentError, match="tail"):
        stream_advance(**new_case(tail=-1))


def test_fake_tensors():
    with FakeTensorMode():
        case = {k: torch.empty(v.shape, dtype=v.dtype, device="cuda") for k, v in new_case().items() if k != "tail"}
        out = stream_advance(**case, tail=0)
    assert [tuple(value.shape) for value in out] == [(7,), (7, 6), (7,)]
    assert {(value.dtype, value.device.type) for value in out} == {(torch.int32, "cuda")}


def test_cost():
    assert stream_advance_cost(8, 15).bytes == 4 * 8 * (48 + 16)


@gpu
def test_opcheck():
    case = new_case(device="cuda")
    names = ("token", "path", "length", "bonus", "status", "is_stop", "cap", *STATE)
    torch.library.opcheck(torch.ops.kdlab.stream_advance.default, (*(case[name] for name in names), 0))
