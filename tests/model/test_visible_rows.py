"""Masks as bitsets: packing and unpacking, and a forward that takes either form."""

import pytest
import torch

from kdlab.errors import ShapeError, UnsupportedDevice
from kdlab.model.cache import LatentCache
from kdlab.model.visible_rows import VisibleRows
from kdlab.tree import DraftTree
from tests.pairs import tiny_pair

PARENTS = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 3, 6, 8])


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 64, 65, 130])
def test_a_causal_chunk_and_random_masks_survive_packing(rows):
    triangle = torch.ones(rows, rows, dtype=torch.bool).tril()
    random = triangle & (torch.rand(rows, rows, generator=torch.Generator().manual_seed(rows)) < 0.5)
    mask = torch.stack([triangle, random | torch.eye(rows, dtype=torch.bool), torch.zeros_like(triangle)])
    packed = VisibleRows.from_mask(mask)
    assert packed.ancestors.dtype == torch.uint32
    assert packed.num_rows.tolist() == [rows, rows, 0]
    assert torch.equal(packed.mask(), mask)
    assert torch.equal(packed.used(), mask.any(-1))


def test_a_tree_is_its_ancestors():
    tree = DraftTree.from_parents(torch.arange(10), PARENTS)
    packed = VisibleRows.from_mask(tree.ancestor_mask())
    assert torch.equal(packed.ancestors, tree.ancestors)
    assert torch.equal(packed.num_rows, tree.num_nodes)


def test_rows_beyond_the_count_see_nothing():
    tree = DraftTree.from_parents(torch.arange(10), PARENTS)
    rows = VisibleRows(tree.ancestors.expand(2, -1, -1), torch.tensor([3, 0], dtype=torch.int32))
    assert torch.equal(rows.mask()[0, :3], tree.ancestor_mask()[0, :3])
    assert not rows.mask()[0, 3:].any()
    assert not rows.mask()[1].any()


def forward(mask, **options):
    target, depth = tiny_pair().target, DraftTree.from_parents(torch.arange(10), PARENTS).depth
    cache = LatentCache.allocate(target.config, 2, 100, torch.float32, "cpu")
    cache.pages.normal_(generator=torch.Generator().manual_seed(1))
    start = torch.tensor([62, 5], dtype=torch.int32)
    tokens = torch.arange(20).view(2, 10)
    return target(tokens, start[:, None] + depth, cache, start, mask, taps=(1,), **options), cache


def test_either_form_gives_the_same_bits():
    tree = DraftTree.from_parents(torch.arange(10), PARENTS)
    rows = VisibleRows(tree.ancestors.expand(2, -1, -1), torch.tensor([10, 7], dtype=torch.int32))
    (ours, our_cache), (theirs, their_cache) = forward(rows), forward(rows.mask())
    assert torch.equal(ours.hidden, theirs.hidden)
    assert torch.equal(ours.taps, theirs.taps)
    assert torch.equal(our_cache.pages, their_cache.pages)
    assert ours.impl == theirs.impl == "reference"


def test_wrong_forms_are_refused():
    tree = DraftTree.from_parents(torch.arange(10), PARENTS)
    with pytest.raises(ShapeError, match=r"mask\.ancestors"):
        forward(VisibleRows(tree.ancestors, tree.num_nodes))
    with pytest.raises(ShapeError, match=r"mask\.num_rows"):
        forward(VisibleRows(tree.ancestors.expand(2, -1, -1), tree.num_nodes))
    with pytest.raises(UnsupportedDevice, match="needs a latent cache on a CUDA GPU"):
        forward(tree.ancestor_mask().expand(2, -1, -1), impl="wgmma")


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 130])
def test_a_causal_chunk_is_its_triangle(rows):
    counts = torch.tensor([rows, rows // 2, 0], dtype=torch.int32)
    triangle = torch.ones(rows, rows, dtype=torch.bool).tril()
    used = torch.arange(rows) < counts[:, None]
    packed = VisibleRows.causal(counts, rows)
    assert torch.equal(packed.ancestors[0], VisibleRows.from_mask(triangle[None]).ancestors[0])
    assert packed.ancestors.is_contiguous()
    assert torch.equal(packed.mask(), triangle & used[:, :, None])
