"""Stages captured piece by piece: the pieces do the call's work, and a chain is one stage's work alone."""

import pytest
import torch

from kdlab.bench.segments import OTHER, record_segments
from kdlab.errors import KdlabError, UnsupportedDevice
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
    segments.chain("norm", times=2)()
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
