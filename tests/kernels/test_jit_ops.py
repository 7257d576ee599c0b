"""CudaOp: ops have no gradients, and say so where some would vanish; who watches ops sees every call."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kdlab.errors import NotSupported
from kdlab.kernels.add_norm import _add_norm, add_norm
from kdlab.kernels.jit import ops
from kdlab.kernels.skinny_linear import _skinny_linear


def twice(x: Tensor, y: Tensor) -> Tensor:
    """What the probe does; like a kernel it reads the address, which what stands in for a tensor has not."""
    assert x.data_ptr()
    return x + y


@pytest.fixture(scope="module")
def registered():
    """An op that runs on the CPU."""
    op = ops.CudaOp("test_probe", twice, ())
    ops._LIBRARY.impl("test_probe", twice, "CPU")
    op.register_fake(lambda x, y: torch.empty_like(x))
    return op


@pytest.fixture
def probe(registered, monkeypatch):
    """The op, taken for one of CUDA tensors, and the calls that came through torch's dispatcher."""
    through, overload = [], torch.ops.kdlab.test_probe.default

    def dispatched(*args):
        through.append(args)
        return overload(*args)

    monkeypatch.setattr(registered, "_overload", dispatched)
    monkeypatch.setattr(ops, "_are_plain", lambda args: ops._PLAIN.issuperset(map(type, args)))
    return registered, through


class FunctionMode(TorchFunctionMode):
    """Sees what Python asks of torch."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Do it."""
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    """Sees what torch asks of its back ends."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Do it."""
        return function(*args, **(kwargs or {}))


def under(mode):
    """Return what calls a function of a tensor within a mode."""

    def call(function, x):
        with mode():
            return function(x)

    return call


WATCHERS = {
    "function mode": under(FunctionMode),
    "dispatch mode": under(DispatchMode),
    "profiler": under(lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])),
    "jit.trace": lambda function, x: torch.jit.trace(function, (x,), check_trace=False)(2 * x) / 2,
    "make_fx": lambda function, x: make_fx(function)(x)(2 * x) / 2,
    "vmap": lambda function, x: torch.vmap(function)(x),
    "functionalize": lambda function, x: torch.func.functionalize(function)(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("watcher", WATCHERS)
def test_who_watches_ops_sees_them_under_inference_mode(probe, watcher):
    op, through = probe
    x = torch.randn(3, 8)
    with torch.inference_mode():
        assert torch.equal(op(x, x), 2 * x)
        assert not through
        assert torch.equal(WATCHERS[watcher](lambda t: op(t, t), x), 2 * x)
    assert through


def test_an_op_breaks_no_graph_of_the_compiler(registered):
    graphs = []

    def keep(graph, _):
        graphs.append(graph.code)
        return graph

    x = torch.randn(3, 8)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch._dynamo.reset()
            assert torch.equal(torch.compile(lambda t: registered(t, t), backend=keep, fullgraph=True)(x), 2 * x)
    assert len(graphs) == 2
    assert all("test_probe" in code for code in graphs)


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
