"""moe_int4 in a row of layers, as in a captured round: ids are written just before they are read, where others stood.

Under programmatic dependent launch a kernel begins while those ahead still run. What it reads too early, or through an
L1 that holds the layer before, is not seen where an op runs alone: here it is, as results of another layer's experts.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kdlab.kernels.add_norm import add_norm
from kdlab.kernels.capture import capture
from kdlab.kernels.experts import DenseExperts, PackedExperts
from kdlab.kernels.moe_int4 import moe_int4
from kdlab.kernels.router import router
from kdlab.kernels.skinny_linear import skinny_linear
from tests.kernels.compare import assert_within_budget
from tests.kernels.moe_cases import BF16, MINI, in_float64, new_experts

WIDTH, TOP_K = MINI["width"], MINI["top_k"]
NUM_LAYERS, REPLAYS = 6, 6


class Layer(NamedTuple):
    router: Tensor  # [E, D]
    bias: Tensor  # [E]
    experts: PackedExperts
    shared: DenseExperts
    norm: Tensor  # [D]


class Trace(NamedTuple):
    outs: list[Tensor]  # of each layer's experts
    cases: list[dict]  # their arguments; of a run without `ids_at` only
    ids_at: list[int]  # addresses of their ids


def new_layers(device="cpu"):
    generator = torch.Generator().manual_seed(5)
    sizes = (MINI["num_experts"], WIDTH, MINI["inner"])
    layers = []
    for _ in range(NUM_LAYERS):
        weight = torch.randn(MINI["num_experts"], WIDTH, generator=generator).to(device, BF16)
        routed = new_experts(*sizes, BF16, BF16, generator, device)
        shared = new_experts(1, *sizes[1:], BF16, None, generator, device)
        bias, norm = torch.zeros(MINI["num_experts"], device=device), torch.ones(WIDTH, dtype=BF16, device=device)
        layers.append(Layer(weight, bias, routed, shared, norm))
    return layers


def run_layers(x, layers, *, shared=True, after=lambda: None, stale=False, keep=False, busy=None):
    """Run x [T, D] through router, experts and norm of all layers.

    Args:
        after: called behind every op.
        stale: the fault that is looked for: experts by the ids of the layer before.
        keep: hold every layer's arguments, so that no two have one address.
        busy: [N, D] weights of a long product behind which each router's logits come late.
    """
    trace, old_ids = Trace([], [], []), None
    residual = normed = x
    for layer in layers:
        if busy is not None:
            skinny_linear(normed, busy)
        ids, weights = router(normed, layer.router, layer.bias, TOP_K, 1.0)
        after()
        picked = old_ids if stale and old_ids is not None else ids
        case = {"x": normed, "expert_ids": picked, "weights": weights, "experts": layer.experts}
        case |= {"shared": layer.shared} if shared else {}
        out = moe_int4(**case)
        after()
        trace.outs.append(out)
        trace.ids_at.append(ids.data_ptr())
        trace.cases.extend([case] if keep else [])
        old_ids = ids.clone() if stale else None
        del ids, weights, picked, case  # their memory is for the layers behind
        residual, normed = add_norm(residual, out, layer.norm, 1e-5)
        after()
    return trace


def equal(one, other):
    """Of each layer, whether its results are the same to the bit."""
    return [torch.equal(a, b) for a, b in zip(one.outs, other.outs, strict=True)]


def test_stale_ids_change_every_layer_behind_the_first():
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).to(BF16)
    layers = new_layers()
    right = run_layers(x, layers, keep=True)
    assert equal(right, run_layers(x, layers)) == [True] * NUM_LAYERS
    assert equal(right, run_layers(x, layers, stale=True)) == [True] + [False] * (NUM_LAYERS - 1)
    ids = [case["expert_ids"] for case in right.cases]
    assert all((a != b).any(dim=-1).all() for a, b in itertools.pairwise(ids))


@pytest.fixture(scope="module")
def layers():
    return new_layers("cuda")


@pytest.fixture(scope="module")
def busy():
    return torch.zeros(65_536, WIDTH, dtype=BF16, device="cuda")


def ids_in(place):
    """Tensor.new_empty, but for the router's ids: all layers' stand in one place, as a layer's do in freed memory."""

    def new_empty(self, *size, **options):
        ids = size == tuple(place.shape) and options.get("dtype") == place.dtype
        return place if ids else new_empty_of_torch(self, *size, **options)

    new_empty_of_torch = torch.Tensor.new_empty
    return new_empty


@pytest.mark.gpu
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late ids"])
@pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])
@pytest.mark.parametrize("rows", range(1, 9))
def test_captured_layers_are_those_that_wait_for_one_another(layers, busy, rows, shared, late, monkeypatch):
    draw = torch.Generator("cuda").manual_seed(rows)
    inputs = torch.randn(REPLAYS, rows, WIDTH, generator=draw, device="cuda").to(BF16)
    x, traces = inputs[0].clone(), []
    options = {"shared": shared, "busy": busy if late else None}
    place = torch.empty(rows, TOP_K, dtype=torch.int32, device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", ids_in(place))
        graph = capture([lambda: traces.append(run_layers(x, layers, **options))])
    captured = traces[-1]
    assert set(captured.ids_at) == {place.data_ptr()}, "the fault needs ids of several layers at one address"
    for values in inputs:
        x.copy_(values)
        for out in captured.outs:
            out.fill_(torch.nan)
        graph.replay()
        waiting = run_layers(x, layers, shared=shared, after=torch.cuda.synchronize, keep=True)
        assert equal(captured, waiting) == [True] * NUM_LAYERS
    for case, out in zip(waiting.cases, waiting.outs, strict=True):
        assert_within_budget(out, in_float64(case), moe_int4(**case, impl="reference"))
    stale = run_layers(x, layers, shared=shared, after=torch.cuda.synchronize, stale=True)
    assert equal(captured, stale) == [True] + [False] * (NUM_LAYERS - 1)  # the comparison can fail
