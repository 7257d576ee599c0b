"""The latent cache: where rows go, and that they go nowhere else."""

import pytest
import torch

from kdlab.errors import ArgumentError
from kdlab.model.cache import PAGE_SIZE, LatentCache
from tests.pairs import tiny_pair


def allocate(num_streams=2, max_rows=100):
    return LatentCache.allocate(tiny_pair().target.config, num_streams, max_rows, torch.float32, "cpu")


def test_allocation():
    cache = allocate(3, 65)
    assert cache.pages.shape == (4, 6, PAGE_SIZE, 576)
    assert cache.block_table.dtype == torch.int32
    assert cache.block_table.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert cache.max_rows == 128
    assert allocate(1, 64).max_rows == 64


@pytest.mark.parametrize(("name", "streams", "rows"), [("num_streams", 0, 1), ("max_rows", 1, 0), ("max_rows", 1, 2.0)])
def test_wrong_sizes_are_named(name, streams, rows):
    with pytest.raises(ArgumentError, match=name):
        allocate(streams, rows)


def test_write_across_a_page_edge_touches_those_rows_of_that_layer_only():
    cache = allocate()
    cache.block_table.copy_(torch.tensor([[2, 0], [3, 1]]))
    rows = torch.randn(2, 3, 576)
    cache.write(1, rows, torch.tensor([62, 5]))
    expected = torch.zeros_like(cache.pages)
    expected[1, 2, 62], expected[1, 2, 63], expected[1, 0, 0] = rows[0]
    expected[1, 3, 5:8] = rows[1]
    assert torch.equal(cache.pages, expected)
    read = cache.read_at(1, cache.places(torch.tensor([62, 5]), 3))
    assert torch.equal(read, rows)


@pytest.mark.parametrize("start", [-1, 126])
def test_rows_outside_the_cache_raise_and_write_nothing(start):
    cache = allocate()
    with pytest.raises(ArgumentError, match="cache rows 0 to 127"):
        cache.write(0, torch.ones(2, 3, 576), torch.tensor([0, start]))
    assert not cache.pages.any()


def test_one_stream_shares_the_pages():
    cache = allocate()
    cache.stream(1).write(0, torch.ones(1, 2, 576), torch.tensor([3]))
    assert cache.pages[0, 2, 3:5].all()
    assert cache.pages.count_nonzero() == 2 * 576


def test_commit_in_all_layers():
    cache = allocate(1)
    cache.pages.copy_(torch.randn_like(cache.pages))
    before = cache.pages[:, :2].flatten(1, 2).clone()
    cache.commit(torch.tensor([61]), torch.tensor([[0, 2, 3, 9, -1]]))
    expected = before.clone()
    for depth, row in enumerate([0, 2, 3, 9]):
        expected[:, 61 + depth] = before[:, 61 + row]
    assert torch.equal(cache.pages[:, :2].flatten(1, 2), expected)


def test_rows_are_rounded_to_the_caches_dtype_and_carry_no_gradient():
    cache = LatentCache.allocate(tiny_pair().target.config, 1, 64, torch.bfloat16, "cpu")
    rows = torch.randn(1, 1, 576, requires_grad=True)
    cache.write(0, rows, torch.tensor([0]))
    assert torch.equal(cache.pages[0, 0, 0], rows[0, 0].detach().bfloat16())
    assert not cache.pages.requires_grad
