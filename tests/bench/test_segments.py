"""Stages of one captured call: all of it does the call's work, and a chain is one stage's work alone."""

import pytest
import torch

from kdlab.bench.segments import OTHER, joints, pieces_of, record_segments
from kdlab.errors import KdlabError, UnsupportedDevice
from kdlab.kernels.skinny_linear import skinny_linear
from kdlab.kernels.stage import observed, stage


def test_marks_reach_the_innermost_observer_alone():
    seen = []

    class Note:
        def __init__(self, name):
            seen.append(name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            seen.append("end")

    with stage("before"):
        pass
    with observed(Note), stage("inside"):
        pass
    with stage("after"):
        pass
    assert seen == ["inside", "end"]


def test_no_gpu_is_said():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UnsupportedDevice, match="segments"):
        record_segments(lambda: None)


LINE = [(1, 2, None), (2, 3, "early"), (3, 4, "early"), (4, 5, None), (5, 6, "early")]


@pytest.mark.parametrize(
    ("pieces", "kernels", "expected"),
    [
        ([[1, 2], [5, 6]], {2, 5}, [(2, 5, None)]),  # 5 waited for all of what was ahead of it
        ([[1, 2], [4, 5]], {2, 4}, [(2, 4, "early")]),
        ([[1, 2], [4, 5]], {4}, [(2, 4, None)]),  # a copy ahead of it
        ([[1, 2], [4], [6]], {2, 4, 6}, [(2, 4, "early"), (4, 6, "early")]),
        ([[1, 2], [3, 4]], {2, 3}, []),  # there already
        ([[3, 4]], {3, 4}, []),
        ([], set(), []),
    ],
)
def test_pieces_of_a_line_stand_one_behind_the_other(pieces, kernels, expected):
    assert joints(pieces, LINE, kernels) == expected


def test_pieces_with_branches_wait_for_all_of_what_is_ahead():
    edges = [(1, 2, None), (1, 3, None), (2, 4, None), (3, 4, None), (4, 5, "early"), (4, 6, None)]
    every = {1, 2, 3, 4, 5, 6}
    assert joints([[1, 2, 3], [5, 6]], edges, every) == [(2, 5, None), (3, 5, None), (2, 6, None), (3, 6, None)]
    assert joints([[1], [5, 6]], edges, every) == [(1, 5, "early"), (1, 6, None)]
    assert joints([[2, 3], [4]], edges, every) == []


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([("a", [2]), ("b", [2]), ("a", [4]), ("c", [6])], [("a", [1, 2]), ("a", [3, 4]), ("c", [5, 6])]),
        ([("a", []), ("b", [6])], [("b", [1, 2, 3, 4, 5, 6])]),
        ([("a", [])], []),
    ],
)
def test_a_piece_is_what_came_since_the_mark_before(marks, expected):
    assert pieces_of(marks, LINE) == expected


def test_branches_belong_to_the_piece_in_which_they_join():
    edges = [(1, 2, None), (1, 3, None), (2, 4, None), (3, 4, None)]
    assert [(name, set(nodes)) for name, nodes in pieces_of([("a", [2]), ("b", [4])], edges)] == [
        ("a", {1, 2}),
        ("b", {3, 4}),
    ]
    assert {name: set(nodes) for name, nodes in pieces_of([("a", [2, 3]), ("b", [4])], edges)} == {
        "a": {1, 2, 3},
        "b": {4},
    }


def chain_of_products(weights, x, norms):
    """Three layers of a product and a norm, with the sum of the norms in no stage; `norms` counts the norms."""
    out = x
    total = torch.zeros((), device="cuda")
    for weight in weights:
        with stage("product"):
            out = out @ weight
        with stage("norm"):
            norms.add_(1)
            size = out.norm()
            out = out / size
        total = total + size
    return out, total


@pytest.mark.gpu
def test_pieces_do_the_work_of_the_call_and_a_chain_that_of_one_stage():
    weights = [torch.randn(64, 64, device="cuda") for _ in range(3)]
    x = torch.randn(8, 64, device="cuda")
    norms = torch.zeros((), dtype=torch.int64, device="cuda")
    expected, total = chain_of_products(weights, x, norms)
    segments = record_segments(lambda: chain_of_products(weights, x, norms))
    assert [name for name, _ in segments.pieces if name != OTHER] == ["product", "norm"] * 3
    assert set(segments.stages()) == {OTHER, "product", "norm"}
    out, found = segments.result
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, total)
    x.mul_(2)
    segments.replay()
    torch.testing.assert_close(found - total, expected.new_tensor(float((x @ weights[0]).norm()) / 2))
    counted = int(norms)
    segments.replay(until="norm")
    assert int(norms) == counted
    for name in segments.stages():
        segments.chain(name)()
    assert int(norms) == counted + 3
    twice = segments.chain("norm")
    twice.repeat(2)
    twice()
    assert int(norms) == counted + 9


@pytest.mark.gpu
def test_stages_that_nest_and_calls_that_fail_leave_the_device_well():
    def nested():
        with stage("outer"), stage("inner"):
            pass

    with pytest.raises(KdlabError, match="'inner' begins inside stage 'outer'"):
        record_segments(nested)
    with pytest.raises(ZeroDivisionError):
        record_segments(lambda: torch.zeros(1, device="cuda") + 1 // 0)
    assert float(torch.ones(1, device="cuda") + 1) == 2.0


@pytest.mark.gpu
def test_kernels_overlap_the_one_ahead_in_a_chain_too():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels that overlap, on Hopper and later")
    weights = [torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) / 16 for _ in range(3)]
    x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)

    def call():
        out = x
        for weight in weights:
            with stage("product"):
                out = skinny_linear(skinny_linear(out, weight, impl="cuda"), weight, impl="cuda")
            with stage("norm"):
                out = out / out.norm()
        return out

    expected = call()
    segments = record_segments(call)
    assert torch.equal(segments.result, expected)
    products = [nodes for name, nodes in segments.pieces if name == "product"]
    assert [len(nodes) for nodes in products] == [2, 2, 2]
    linked = joints(products, segments.edges, segments.kernels)
    assert [data is not None for _, _, data in linked] == [True, True]
    chain = segments.chain("product")
    chain.repeat(3)
    chain()
    segments.replay()
    assert torch.equal(segments.result, expected)
