"""library_linear: any cut gives the product, on the CPU exactly, on a GPU by rows against float64."""

import pytest
import torch
from torch.nn import functional as F

from kdlab.kernels import library_linear as module
from kdlab.kernels.library_linear import WHOLE, Cut, find_cut, library_linear
from kdlab.kernels.router import router
from kdlab.kernels.skinny_linear import skinny_linear
from tests.kernels.compare import assert_faults_are_found, assert_within_budget
from tests.kernels.test_skinny_linear import new_case, run_reference

CUTS = [WHOLE, Cut(rows=2), Cut(features=3), Cut(features=11)]


def small_integers(*shape):
    """Values whose products and sums are exact in bfloat16."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def test_products_are_cut_where_that_was_measured_to_be_quicker():
    assert [find_cut(rows, 2112, 7168) for rows in (64, 65, 73, 132, 400, 544, 545)] == [
        WHOLE, Cut(features=11), WHOLE, Cut(features=33), WHOLE, Cut(rows=2), WHOLE,
    ]  # fmt: skip
    assert [find_cut(rows, 1536, 1536) for rows in (256, 528)] == [WHOLE, Cut(features=6)]
    assert [find_cut(rows, 4608, 7168) for rows in (40, 64, 129)] == [WHOLE, Cut(features=18), WHOLE]
    assert find_cut(528, 2112, 1024) == WHOLE


@pytest.mark.parametrize(("features", "inputs"), module._MEASURED)
def test_parts_are_equal(features, inputs):
    for rows in range(1200):
        cut = find_cut(rows, features, inputs)
        assert rows % cut.rows == 0
        assert features % cut.features == 0
        assert WHOLE in (cut._replace(rows=1), cut._replace(features=1))


@pytest.fixture(params=CUTS, ids=str)
def cut(request, monkeypatch):
    """One way to cut every product."""
    monkeypatch.setattr(module, "find_cut", lambda *_: request.param)
    return request.param


def test_any_cut_gives_the_product(cut):
    wide, weight = small_integers(6, 40), small_integers(66, 24)
    for x in (wide[:, :24].contiguous(), wide[:, 8:32]):
        assert torch.equal(library_linear(x, weight), F.linear(x, weight))


def test_gradients_flow(cut):
    x, weight = small_integers(6, 24).requires_grad_(), small_integers(66, 24)
    library_linear(x, weight).float().sum().backward()
    assert torch.equal(x.grad, weight.sum(0).expand(6, -1))


def test_transforms_of_torch_and_autocast_take_the_whole_product(cut):
    """The twin, parts there too, ended in torch's "Batching rule not implemented" and gave x's dtype in autocast."""
    x, weight = small_integers(6, 24), small_integers(66, 24)
    for many, other in ((x.repeat(3, 1, 1), weight), (x, weight.repeat(3, 1, 1))):
        places = (0 if many.dim() == 3 else None, 0 if other.dim() == 3 else None)
        every = torch.vmap(library_linear, in_dims=places)(many, other)
        assert torch.equal(every, F.linear(x, weight).expand(3, -1, -1))
    assert torch.equal(torch.func.jvp(lambda rows: library_linear(rows, weight), (x,), (x,))[1], F.linear(x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert library_linear(x.half(), weight.half()).dtype == torch.bfloat16
        assert library_linear(x.half(), weight.half(), out=torch.empty(6, 66).half()).dtype == torch.float16


def test_autocast_rounds_no_float32_that_was_asked_for():
    x, weight = torch.randn(6, 24), torch.randn(66, 24)
    args = (x, weight, torch.zeros(66), 8, 1.0)
    for run in (lambda: skinny_linear(x.bfloat16(), weight.bfloat16(), dtype=torch.float32), lambda: router(*args)[1]):
        with torch.autocast("cpu", torch.bfloat16):
            inside = run()
        assert inside.dtype == torch.float32
        assert torch.equal(inside, run())


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_against_float64(cut, dtype, gated):
    rows, features, inputs = 146, 2112, 1024
    x, weight = (t.cuda() for t in new_case(rows, features, inputs, dtype))
    wide = torch.full((rows, inputs + 64), torch.nan, dtype=dtype, device="cuda")
    wide[:, :inputs] = x
    exact, plain = run_reference(x, weight, gated=gated)
    y = skinny_linear(wide[:, :inputs], weight, gated=gated)
    assert_within_budget(y, exact, plain)
    assert_faults_are_found(y, exact, plain, tile=8)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_for_any_number_of_rows(device):
    torch.compiler.reset()
    compiled = torch.compile(library_linear, backend="eager", fullgraph=True)
    weight = torch.randn(1536, 1536).bfloat16().to(device)
    for rows in (258, 259, 300):
        x = torch.randn(rows, 1536).bfloat16().to(device)
        assert torch.equal(compiled(x, weight), F.linear(x, weight))
