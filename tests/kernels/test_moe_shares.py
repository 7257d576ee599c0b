"""moe_int4: blocks that share units of work: the sums that one hands to the next, and counters that stay zero."""

import pytest
import torch

from kdlab.kernels import counters
from kdlab.kernels.moe_int4 import moe_int4
from tests.kernels.moe_cases import BF16, F32, assert_right, new_case

gpu = pytest.mark.gpu
CASES = [(33, 2048, BF16, BF16), (70, 1024, BF16, BF16), (33, 1536, BF16, None), (33, 1024, F32, BF16)]


@gpu
@pytest.mark.parametrize(("num_rows", "width", "dtype", "scale"), CASES)
def test_a_row_has_the_same_bits_wherever_its_units_are_cut(num_rows, width, dtype, scale):
    case = new_case(num_rows, width=width, inner=512, dtype=dtype, scale=scale, device="cuda")
    out = moe_int4(**case)
    assert_right(case, out)
    for some in (slice(0, 5), slice(7, 24)):  # other units, and other shares of them
        few = {name: case[name][some] for name in ("x", "expert_ids", "weights")}
        assert torch.equal(moe_int4(**(case | few)), out[some])
    assert counters._rings
    assert not any(ring.any() for ring, _ in counters._rings.values())
    later = case["x"].clone()
    later[:, : width // 2] = 0  # as if what a block hands over, sums of the first slabs, got lost
    with pytest.raises(AssertionError):
        assert_right(case, moe_int4(**(case | {"x": later})))
