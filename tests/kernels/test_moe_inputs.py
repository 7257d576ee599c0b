"""What moe_int4 may be given: ids of any width, and inputs of any size that scales make up for."""

import pytest
import torch

from kdlab.kernels import moe_int4 as module
from kdlab.kernels.moe_int4 import moe_int4
from tests.kernels.compare import assert_within_budget
from tests.kernels.moe_cases import assert_right, in_float64, new_case

gpu = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64])
def test_ids_of_any_width_reach_the_kernels(dtype, monkeypatch):
    """Those outside 0..E-1 as ids that are no expert; no kernel runs here."""
    monkeypatch.setattr(module, "_runs_kernel", lambda *_: True)
    monkeypatch.setattr(module, "_moe_int4", lambda x, expert_ids, *_: expert_ids)
    case = new_case(3, num_experts=6)
    ids = torch.tensor([0, 3, 5, 100]).repeat(3, 1)
    assert module.moe_int4(**(case | {"expert_ids": ids.to(dtype)})).tolist() == ids.clamp(-1, 6).tolist()


@gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
@pytest.mark.parametrize("rows", [1, 9, 130])
def test_ids_of_few_bits_are_the_same_experts(rows, dtype):
    case = new_case(rows, device="cuda")
    out = assert_right(case)
    assert torch.equal(moe_int4(**(case | {"expert_ids": case["expert_ids"].to(dtype)}), impl="cuda"), out)
    case["expert_ids"][0, 0] = 200  # no expert
    assert not torch.equal(moe_int4(**(case | {"expert_ids": case["expert_ids"].to(dtype)}), impl="cuda"), out)


@gpu
@pytest.mark.parametrize("size", [1e-12, 1e12])
@pytest.mark.parametrize("rows", [3, 17, 130])
def test_small_and_large_inputs_that_scales_make_up_for(rows, size):
    case = new_case(rows, shared=True, device="cuda")
    case["x"].mul_(size)
    case["experts"].gate_up_scale.div_(size)
    case["shared"].gate_up.div_(size)
    assert_right(case)


@gpu
@pytest.mark.parametrize("scale", [torch.bfloat16, None])
@pytest.mark.parametrize("rows", [3, 17, 130])
def test_a_set_of_one_expert(rows, scale):
    case = new_case(rows, scale=scale, num_experts=1, top_k=1, device="cuda")
    assert_right(case)
    case["expert_ids"][1:] = -1
    one = {name: case[name][:1] for name in ("x", "expert_ids", "weights")}
    out = moe_int4(**case)
    assert torch.equal(out[1:], torch.zeros_like(out[1:]))
    assert_within_budget(out[:1], in_float64(case | one), moe_int4(**(case | one), impl="reference"))
