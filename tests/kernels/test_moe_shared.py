"""moe_int4's shared expert: units beside the routed experts' in the same kernels, of any width, for every row."""

import pytest
import torch

from kdlab.kernels.moe_int4 import moe_int4
from tests.kernels.moe_cases import BF16, F16, assert_right, new_case, new_experts

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize(("rows", "inner"), [(5, 32), (33, 96), (17, 256)])
def test_a_shared_expert_of_another_width(rows, inner):
    case = new_case(rows, device="cuda")
    generator = torch.Generator().manual_seed(inner)
    case["shared"] = new_experts(1, 256, inner, BF16, None, generator, "cuda")
    assert_right(case)


@gpu
@pytest.mark.parametrize("rows", [5, 33])
def test_rows_that_pick_nobody_have_the_shared_expert_alone(rows):
    case = new_case(rows, shared=True, device="cuda")
    everyone = moe_int4(**case)
    nobody = moe_int4(**(case | {"expert_ids": torch.full_like(case["expert_ids"], -1)}))
    case["expert_ids"][::2] = -1
    out = moe_int4(**case)
    assert torch.equal(out[::2], nobody[::2])
    assert torch.equal(out[1::2], everyone[1::2])
    assert nobody.any(dim=-1).all()
    assert not torch.equal(nobody, everyone)


@gpu
def test_more_picks_than_a_block_keeps():
    # 1,600 of 1,024; scales of another dtype than the rows' keep the kernels of many rows away.
    assert_right(new_case(200, scale=F16, shared=True, top_k=8, device="cuda"))


@gpu
def test_a_row_of_one_rank_does_not_depend_on_where_its_tiles_are_cut():
    case = new_case(40, shared=True, width=7168, inner=256, num_experts=384, top_k=8, device="cuda")
    together = moe_int4(**case)
    for rows in (slice(0, 5), slice(5, 14), slice(14, 31)):
        some = {name: case[name][rows] for name in ("x", "expert_ids", "weights")}
        assert torch.equal(moe_int4(**(case | some)), together[rows])
    assert not torch.equal(moe_int4(**(case | {"expert_ids": case["expert_ids"].roll(1, dims=0)})), together)
