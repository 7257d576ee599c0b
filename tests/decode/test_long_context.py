"""Positions past 131,072: a forward there against float64, and a whole round behind a prefix of 262,000 rows."""

import math
from functools import cache

import pytest
import torch

import kdlab
from kdlab.decode.round import Round
from kdlab.decode.settings import make_settings
from kdlab.decode.transcript import Transcript
from kdlab.kernels import rope
from kdlab.model.cache import PAGE_SIZE, LatentCache
from kdlab.model.visible_rows import VisibleRows
from kdlab.paths import DATA
from kdlab.tree import DraftTree
from tests.decode.ar_oracle import Oracle
from tests.kernels.compare import assert_within_budget
from tests.pairs import tiny_pair

PARENTS = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 3, 6, 8])
PLACES = [131_071, 131_072, 200_003, 262_080]


@torch.inference_mode()
def forward_at(pair, place):
    """Logits [10, V] f64 of a tree behind 40 committed tokens that begin at absolute position `place`."""
    cache = LatentCache.allocate(pair.target.config, 1, 64, pair.dtype, "cpu")
    text = torch.arange(40)[None] % 100 + 20
    begin, behind = torch.zeros(1, dtype=torch.int32), torch.full((1,), 40, dtype=torch.int32)
    pair.target(text, place + torch.arange(40)[None], cache, begin, VisibleRows.causal(behind, 40))
    tree = DraftTree.from_parents(torch.arange(10) + 97, PARENTS)
    rows = VisibleRows(tree.ancestors, tree.num_nodes)
    out = pair.target(tree.token, place + 40 + tree.depth, cache, behind, rows)
    return pair.target.head(out.hidden)[0].double()


@cache
def near():
    return forward_at(tiny_pair("float64"), 0)


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_far_out_is_that_of_float64_and_that_of_position_0(place):
    """Rope turns by distance alone, so where a text stands does not change what it means."""
    exact = forward_at(tiny_pair("float64"), place)
    torch.testing.assert_close(exact, near(), atol=5e-6, rtol=0.0)  # the tables are float32 in either dtype
    torch.testing.assert_close(forward_at(tiny_pair(), place), exact, atol=1e-4, rtol=0.0)


def test_angles_formed_in_float32_would_be_found_out(monkeypatch):
    def coarse(positions, config, device=None):
        angles = positions.float()[..., None] * rope.inverse_frequencies(config).float()
        return angles.cos() * config.amplitude, angles.sin() * config.amplitude

    monkeypatch.setattr("kdlab.model.attention.rope_tables", coarse)
    wrong = forward_at(tiny_pair(), 262_080)
    assert (wrong - near()).abs().max() > 5e-3


@pytest.mark.parametrize("place", [*PLACES, 262_143])
def test_the_targets_tables_far_out(place):
    frequencies = Oracle(DATA / "tiny-pair" / "target").freq
    cos, sin = rope.rope_tables(torch.tensor([place]), tiny_pair().target.config.rope)
    for i, frequency in enumerate(frequencies.tolist()):
        turn = math.fmod(place * frequency, 2 * math.pi)
        assert abs(float(cos[0, i]) - math.cos(turn)) < 1e-6
        assert abs(float(sin[0, i]) - math.sin(turn)) < 1e-6


def test_the_drafters_tables_reach_the_end_of_the_context():
    drafter = tiny_pair().drafter
    context = drafter.new_context(1, 262_144, "cpu", torch.float32)
    assert len(context.cos) == 262_144 + drafter.config.block_size
    for place in (*PLACES, 262_151):
        turns = place * rope.inverse_frequencies(drafter.rope)
        torch.testing.assert_close(context.cos[place].double(), turns.cos(), atol=1e-6, rtol=0.0)
        torch.testing.assert_close(context.sin[place].double(), turns.sin(), atol=1e-6, rtol=0.0)


def root_rows(pair, prefix, *, impl="auto", graph="off"):
    """Latent and rotated key [2, W] f64 that a round writes for its root in layers 0 and 1, behind `prefix` rows.

    Layer 1's has been through the attention of layer 0 and no router, whose near-ties would choose other experts. All
    pages of the prefix are one page, so that the cache stays small; the whole block table is walked all the same.
    """
    generator, device = torch.Generator().manual_seed(0), pair.device
    cache = LatentCache.allocate(pair.target.config, 1, 8 * PAGE_SIZE, pair.dtype, device)
    cache.pages.copy_(torch.randn(cache.pages.shape, generator=generator).bfloat16())
    first = prefix // PAGE_SIZE
    table = torch.zeros(1, first + 7, dtype=torch.int32)
    table[0, first:] = torch.arange(1, 8)
    context = pair.new_context(1, prefix + 50)
    context.length.fill_(prefix)
    settings = make_settings(pair, 1, budget=15, impl=impl, graph=graph)
    one = Round(pair, settings, LatentCache(cache.pages, table.to(device)), context)
    if settings.graph:
        one.capture()
    transcript = Transcript([1] * prefix, 50, "length", frozenset())
    transcript.extend([7])
    one.streams.admit(0, 0, transcript)
    one.run()
    fields = one.record.read(one.record.words.cpu().numpy())
    assert (fields["start"][0], fields["status"][0], fields["running"][0]) == (prefix, 0, 1)
    return cache.pages[:2, 1, prefix % PAGE_SIZE].double().cpu()


def check_root_rows(device, prefix, graphs):
    exact_pair, pair = (kdlab.load_pair("bundled", device=device, dtype=dtype) for dtype in ("float64", "bfloat16"))
    exact = root_rows(exact_pair, prefix, impl="reference")
    plain = root_rows(pair, prefix, impl="reference").bfloat16()
    for graph in graphs:
        assert_within_budget(root_rows(pair, prefix, graph=graph).bfloat16(), exact, plain)
    with pytest.raises(AssertionError):
        assert_within_budget(root_rows(pair, prefix - 1).bfloat16(), exact, plain)


def test_a_round_behind_3000_rows():
    check_root_rows("cpu", 3000, ["off"])


@pytest.mark.gpu
def test_a_round_behind_262000_rows():
    check_root_rows("cuda", 262_000, ["off", "on"])
