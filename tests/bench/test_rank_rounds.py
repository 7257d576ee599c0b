"""Rounds of some of a model's ranks, over gloo at tiny sizes: the exchanges of all of them, and none when left out."""

from collections import Counter

import pytest
import torch

from kdlab.bench.full_width.point import Point, Rounds, without_collectives
from kdlab.bench.full_width.random_pair import random_pair
from kdlab.bench.full_width.routing import plan_routing
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.decode.settings import make_settings
from kdlab.errors import ArgumentError
from kdlab.model.ranks import Ranks, init_ranks
from kdlab.paths import DATA
from kdlab.study.step_cost import Step, all_reduces
from tests.rank_processes import run_ranks, values_of

TARGET = TargetConfig.load(DATA / "tiny-pair" / "target")
DRAFTER = DrafterConfig.load(DATA / "tiny-pair" / "drafter")
SIZE, RUNNING, CONTEXT = 4, 2, 24
CASES = (("tp", 9), ("ep", 9), ("tp", 1))  # experts, rows


def on_some_ranks(rank):
    """Every case on the same processes."""
    found = [rounds_of(init_ranks("cpu", experts).among(SIZE), rows) for experts, rows in CASES]
    ranks = init_ranks("cpu").among(SIZE)
    copies = ranks.all_gather(torch.tensor([rank]), "head").flatten().tolist()
    ranks.close()
    return found, copies, ranks.shifts(torch.device("cpu")).tolist()


def rounds_of(ranks, rows):
    """What `measure` does without its clock: a round with its collectives, one without, and one with them again."""
    point = Point(rows, 2, CONTEXT, 0.8)
    pair = random_pair(TARGET, DRAFTER, ranks=ranks, device=torch.device("cpu"), dtype=torch.float32)
    settings = make_settings(pair, 2, method="ar" if rows == 1 else "ddtree", budget=rows - 1, max_new_tokens=2**20,
                             stop_token_ids=[], streams=2, graph="off")  # fmt: skip
    step = Step.routed(TARGET, rows, point.g, streams=2, context=CONTEXT, ranks=SIZE, experts=ranks.experts)
    plan_routing(pair.target, step.tokens, step.distinct)
    torch.manual_seed(0)
    rounds, found = Rounds(pair, settings, CONTEXT), []
    for left_out in (False, True, False):
        ranks.calls.clear()
        rounds.place()
        rounds.round.streams.anchor.fill_(7)
        if rows > 1:
            rounds.round.context.length.fill_(CONTEXT)  # which the CPU checks
        if left_out:
            with without_collectives(pair):
                rounds.round.run()
        else:
            rounds.round.run()
        found.append((dict(ranks.calls), rounds.round.record.words.tolist()))
    return found


def test_some_of_the_ranks_exchange_what_all_of_them_would(tmp_path):
    values = values_of(run_ranks(RUNNING, on_some_ranks, folder=tmp_path))
    for found, copies, shifts in values:
        assert (copies, shifts) == ([0, 1, 0, 1], [0, 0, 2, 2])
        for (_, rows), ((calls, words), (none, alone), again) in zip(CASES, found, strict=True):
            drafter = None if rows == 1 else DRAFTER
            step = Step.routed(TARGET, rows, 0.8, streams=2, ranks=SIZE)
            assert Counter(calls) - Counter({"head": calls["head"]}) == expected_calls(drafter)
            assert sum(calls.values()) - calls["head"] == all_reduces(TARGET, drafter, step)[0]
            assert calls["head"] == (1 if drafter is None else 2)
            assert none == {}
            assert again == (calls, words)
            assert alone != words
    together = [[rounds[0] for rounds in found] for found, _, _ in values]
    assert together[0] == together[1]  # decided alike


def expected_calls(drafter):
    layers = TARGET.num_hidden_layers
    calls = Counter(attention=layers, mlp=layers, embedding=1)
    if drafter is not None:
        calls += Counter(drafter=2 * drafter.num_hidden_layers + 1, embedding=1)
    return calls


def test_ranks_cannot_be_among_fewer():
    with pytest.raises(ArgumentError, match="ranks: expected at least 4, got 2"):
        Ranks(1, 4).among(2)
    assert Ranks(1, 2).among(8).missing == 6
    assert Ranks.slice_of(1, 4).shifts(torch.device("cpu")).tolist() == [-1, 0, 1, 2]
