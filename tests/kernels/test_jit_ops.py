"""CudaOp: ops have no gradients, and say so where some would vanish; who watches ops sees every call."""

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from kdlab.errors import NotSupported
from kdlab.kernels.add_norm import _add_norm, add_norm
from kdlab.kernels.skinny_linear import _skinny_linear


def test_gradients_that_would_vanish_are_refused():
    x, weight = (torch.empty(n, 256, dtype=torch.bfloat16, device="meta") for n in (3, 64))
    assert _skinny_linear(x, weight, False, False).shape == (3, 64)
    weight.requires_grad_()
    with pytest.raises(NotSupported, match="skinny_linear: expected no argument that requires a gradient"):
        _skinny_linear(x, weight, False, False)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert _skinny_linear(x, weight, False, False).shape == (3, 64)


def test_fakes_run_nothing_under_inference_mode_either():
    with torch.inference_mode():
        with FakeTensorMode():
            x, weight = (torch.empty(n, 256, dtype=torch.bfloat16, device="cuda:0") for n in (3, 64))
            y = _skinny_linear(x, weight, False, False)
        for found in (y, _skinny_linear(x, weight, False, False)):  # outside of their mode too
            assert isinstance(found, FakeTensor)
            assert found.shape == (3, 64)


@pytest.mark.gpu
def test_inference_calls_the_function_itself_unless_someone_watches(monkeypatch):
    x = torch.randn(3, 256, dtype=torch.bfloat16, device="cuda")
    weight, overload, through = torch.ones(256, dtype=x.dtype, device="cuda"), torch.ops.kdlab.add_norm.default, []

    def dispatched(*args):
        through.append(args)
        return overload(*args)

    monkeypatch.setattr(_add_norm, "_overload", dispatched)
    expected = add_norm(x, x, weight, 1e-5)
    assert len(through) == 1
    with torch.inference_mode():
        found = add_norm(x, x, weight, 1e-5)
        assert len(through) == 1
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            watched = add_norm(x, x, weight, 1e-5)
    assert len(through) == 2
    assert "kdlab::add_norm" in {event.key for event in profile.key_averages()}
    for total, normed in (found, watched):
        assert torch.equal(total, expected[0])
        assert torch.equal(normed, expected[1])
