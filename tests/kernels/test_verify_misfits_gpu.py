"""Lengths, pages and tensors that do not fit, on a GPU: nothing outside is read, and the rest stays right."""

from dataclasses import replace

import pytest
import torch

from kdlab.errors import ShapeError
from tests.kernels.compare import assert_within_budget
from tests.kernels.test_verify_attention_gpu import FIXED, KERNELS, attend, check_result, runnable
from tests.kernels.verify_cases import make_case

pytestmark = pytest.mark.gpu


@pytest.fixture(params=KERNELS)
def impl(request):
    return runnable(request.param)


def test_lengths_that_do_not_fit_read_nothing_outside(impl):
    """A prefix beyond the block table, a negative one, too many nodes: no crash, and other streams stay right."""
    case = make_case([64] * 6, [5] * 6, 8, seed=8)
    keys = case.block_table.shape[1] * 64
    bad = replace(
        case,
        prefix_len=torch.tensor([10**6, -7, 64, 64, keys - 2, keys], dtype=torch.int32, device="cuda"),
        num_nodes=torch.tensor([5, 5, 2**31 - 1, 5, 5, -9], dtype=torch.int32, device="cuda"),
    )
    o, lse = attend(bad, impl)
    torch.cuda.synchronize()
    assert_within_budget(o[3], case.expected()[0][3], case.expected(torch.bfloat16)[0][3])
    for unused, unused_lse in ((o[0], lse[0]), (o[4, 2:], lse[4, 2:]), (o[5], lse[5])):  # of tree rows without a place
        assert (unused == 0).all()
        assert (unused_lse == -torch.inf).all()


@pytest.mark.parametrize("page", [-1, -(2**31), 2**25 + 1, 2**31 - 1, None])
@pytest.mark.parametrize("name", [*FIXED, "reference"])
def test_a_page_that_does_not_exist_counts_as_zeros(name, page):
    """In the prefix, under the tree, and first of all; None is the page behind the last. The twin reads page 0."""
    case = make_case([640, 0, 70], [9, 65, 3], 16, seed=9)
    runnable(name)
    places = ([0, 0, 1, 2], [3, 10, 1, 0])
    pages = torch.cat([case.pages, torch.zeros_like(case.pages[:1])])

    def with_page(value):
        table = case.block_table.clone()
        table[places] = value
        return replace(case, block_table=table)

    zeros = replace(with_page(len(case.pages)), pages=pages)
    exact, exact_lse = zeros.expected()
    plain = zeros.expected(torch.bfloat16)[0]
    o, lse = attend(with_page(len(case.pages) if page is None else page), name)
    check_result(o, lse, exact, exact_lse, plain)
    with pytest.raises(AssertionError):
        check_result(*attend(with_page(0), name), exact, exact_lse, plain)


@pytest.mark.parametrize("impl", [impl for impl in KERNELS if impl != "naive"])
@pytest.mark.parametrize("field", ["q", "pages"])
def test_data_off_16_bytes_is_refused_and_the_gpu_lives_on(impl, field):
    case = make_case([5], [3], 8)
    good = getattr(case, field)
    shifted = torch.empty(good.numel() + 1, dtype=good.dtype, device="cuda")[1:].view(good.shape)
    with pytest.raises(ShapeError, match=field):
        attend(replace(case, **{field: shifted}), impl)
    torch.cuda.synchronize()
