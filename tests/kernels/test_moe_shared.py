"""The shared expert of few rows by skinny_linear: who takes it, and that both ways of it are right."""

import pytest
import torch

from kdlab.kernels import moe_shared
from kdlab.kernels.moe_int4 import moe_int4
from kdlab.kernels.moe_shared import run_shared
from tests.kernels.moe_cases import BF16, F16, F32, assert_right, new_case

gpu = pytest.mark.gpu


@pytest.mark.parametrize(
    ("rows", "width", "inner", "dtype", "arch", "skinny"),
    [
        (1, 7168, 256, BF16, "sm_90a", True),  # one rank of 8
        (64, 7168, 256, F16, "sm_90a", True),
        (65, 7168, 256, BF16, "sm_90a", False),
        (1, 7168, 2048, BF16, "sm_90a", True),
        (1, 7168, 256, BF16, "sm_80", False),  # no clusters
        (1, 7168, 256, F32, "sm_90a", False),
        (1, 7168, 64, BF16, "sm_90a", False),  # down: inputs by 128
        (0, 7168, 256, BF16, "sm_90a", False),
    ],
)
def test_few_rows_go_through_it_as_two_products(rows, width, inner, dtype, arch, skinny, monkeypatch):
    launched = []
    monkeypatch.setattr("kdlab.kernels.skinny_linear.jit.arch_of", lambda device: arch)
    monkeypatch.setattr(moe_shared, "run_skinny", lambda x, weight, y, epilogue: launched.append((y.shape, epilogue)))
    x = torch.empty(rows, width, dtype=dtype, device="meta")
    gate_up, down = x.new_empty(1, 2 * inner, width), x.new_empty(1, width, inner)
    parts = x.new_empty(rows, 9, width, dtype=F32)
    assert run_shared(x, gate_up, down, parts[:, 8]) == skinny
    products = [((1, rows, inner), moe_shared.GATED), ((1, rows, width), moe_shared.FLOAT)]
    assert launched == (products if skinny else [])


@gpu
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 33, 64, 65])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_shared_expert_beside_routed_ones(rows, dtype):
    assert_right(new_case(rows, dtype=dtype, shared=True, device="cuda"))


@gpu
def test_the_shared_expert_where_a_row_has_no_other():
    case = new_case(5, shared=True, device="cuda")
    case["expert_ids"][2] = -1
    out, alone = moe_int4(**case), moe_int4(**(case | {"expert_ids": torch.full_like(case["expert_ids"], -1)}))
    assert torch.equal(out[2], alone[2])
    assert not torch.equal(out[1], alone[1])
    assert alone.any(dim=-1).all()
