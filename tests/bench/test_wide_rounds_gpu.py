"""Captured rounds at Kimi K2.6's widths: replays, one right behind another, write what the same rounds write that wait.

Ops alone and rounds of the mini do not meet this: kernels for these widths behind one another, each begun before the
one ahead has ended, over memory that holds what another layer, or the round before, left there.
"""

import pytest
import torch

from kdlab.bench.full_width.point import Rounds
from kdlab.bench.full_width.random_pair import k26_pair
from kdlab.decode.settings import make_settings
from kdlab.kernels import jit
from kdlab.model.ranks import Ranks

LAYERS, CONTEXT = 3, 190  # a dense layer and two of experts
SHARD = 163_840 // 8  # tokens that the rank's embedding holds
# Rows and streams, on both sides of where ops take other kernels.
SHAPES = {
    "tp": [(1, 1), (4, 1), (5, 1), (9, 2), (33, 1), (67, 1), (68, 1), (72, 1), (73, 1), (128, 1), (129, 1), (36, 4),
           (29, 5), (65, 8), (75, 8), (443, 2), (887, 1), (55, 20), (36, 32), (577, 2)],
    "ep": [(1, 1), (9, 2), (65, 1), (79, 1), (80, 1), (65, 8), (55, 20)],
}  # fmt: skip
CASES = [(experts, *shape) for experts, shapes in SHAPES.items() for shape in shapes]


@pytest.fixture(scope="module")
def pair_of():
    """Makes the pair of a split, and keeps the last one: there is no need of two."""
    kept = {}

    def make(experts):
        if experts not in kept:
            kept.clear()
            kept[experts] = k26_pair(Ranks.slice_of(0, 8, experts), LAYERS, torch.device("cuda"))
        return kept[experts]

    yield make
    kept.clear()


def new_rounds(pair, rows, streams):
    """Rounds of trees, or of AR, whose routers choose for themselves."""
    settings = make_settings(
        pair,
        streams,
        method="ar" if rows == 1 else "ddtree",
        budget=rows - 1,
        top_k=None if rows == 1 else min(rows - 1, 64),
        max_new_tokens=1 << 20,
        stop_token_ids=[],
        streams=streams,
        record_experts=True,
        graph="off",
    )
    return Rounds(pair, settings, CONTEXT)


def written(rounds):
    """What rounds leave: cache rows, records, where the streams stand, the drafter's context without the bin."""
    one = rounds.round
    found = [one.cache.pages, *one.record.tensors, one.streams.start, one.streams.anchor]
    if one.context is not None:
        found += [one.context.keys[:, :, :-1], one.context.values[:, :, :-1]]
    return found


def run_two(rounds, before, anchor):
    """What two rounds in a row leave that begin with these tensors and tokens."""
    for tensor, values in zip(written(rounds), before, strict=True):
        tensor.copy_(values)
    rounds.place()
    rounds.round.streams.anchor.copy_(anchor)
    for _ in range(2):
        rounds.round.run()
    return [tensor.clone() for tensor in written(rounds)]


def equal(some, others):
    return [torch.equal(one, other) for one, other in zip(some, others, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "rows", "streams"), CASES)
def test_replays_write_what_rounds_that_wait_write(pair_of, experts, rows, streams, monkeypatch):
    rounds, launch = new_rounds(pair_of(experts), rows, streams), jit.Kernel.launch
    before = [tensor.clone() for tensor in written(rounds)]
    anchors = [(torch.arange(streams) * 977 + first) % SHARD for first in (5, 15_000)]

    def launch_and_wait(self, *args, **options):
        launch(self, *args, **options)
        torch.cuda.synchronize()

    with monkeypatch.context() as patch:
        patch.setattr(jit.Kernel, "launch", launch_and_wait)
        waiting = [run_two(rounds, before, anchor) for anchor in anchors]
    rounds.round.streams.running.fill_(False)
    rounds.round.capture()
    for which in (0, 1, 1, 0):
        found = run_two(rounds, before, anchors[which])
        assert equal(found, waiting[which]) == [True] * len(found)
    pages = [left[0] for left in waiting]
    assert pages[0].isfinite().all()
    assert equal(*pages) == [False] * LAYERS  # other tokens are seen in every layer
