"""Several ranks over gloo decode what one rank decodes: tokens, trees, paths and experts, for both splits of experts."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch

import kdlab
from kdlab.model.ranks import Ranks
from tests.pairs import golden_prompts, tiny_pair
from tests.rank_processes import run_ranks, values_of

CASES = {
    "tree": dict(budget=15, record_experts=True),
    "tree at 0.8, top-p": dict(budget=9, temperature=0.8, top_p=0.9, seed=3, streams=2),
    "chain at 1.0": dict(method="chain", temperature=1.0, seed=2**40),
    "ar": dict(method="ar", streams=1),
}
SPLITS = [("tp", 2), ("ep", 2), ("tp", 4), ("ep", 4)]
NUM_TOKENS = 16


def decode(pair, name, prompts):
    run = kdlab.generate(pair, prompts, max_new_tokens=NUM_TOKENS, **CASES[name])
    return run.output_ids, [[as_plain(record) for record in records] for records in run.rounds]


def as_plain(record):
    tree, experts = record.tree, record.expert_ids
    fields = {name: getattr(tree, name).tolist() for name in ("token", "parent", "depth", "rank", "num_nodes")}
    fields |= dict(start=record.anchor_position, path=record.path, bonus=record.bonus, logp=tree.logp.tolist())
    return fields | dict(targets=record.target_tokens.tolist(), experts=None if experts is None else experts.tolist())


def decode_on_rank(rank, size, experts, dtype, cases):
    pair = kdlab.load_pair("tiny", ranks=size, experts=experts, dtype=dtype)
    found = {name: decode(pair, name, golden_prompts()[:3]) for name in cases}
    pair.ranks.close()
    return found


@cache
def one_rank(dtype, name):
    return decode(tiny_pair(dtype), name, golden_prompts()[:3])


@pytest.mark.parametrize(("experts", "size"), SPLITS)
def test_ranks_decode_the_same_rounds_in_float64(experts, size, tmp_path):
    for rank, found in enumerate(values_of(run_ranks(size, decode_on_rank, size, experts, "float64", CASES, folder=tmp_path))):
        for name in CASES:
            assert found[name] == one_rank("float64", name), (rank, name)
