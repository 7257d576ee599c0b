"""Inputs and independent answers that the tree tests share."""

import itertools
import json
from functools import cache
from pathlib import Path

import numpy as np
import torch

from kdlab.tree import build_best_first

GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def golden_cases():
    return json.loads((GOLDEN / "trees.json").read_text())


@cache
def golden_arrays():
    return np.load(GOLDEN / "trees.npz")


def golden_input(case):
    """Return the best min(budget, V) candidates of a golden case: equal ones go by the smaller id."""
    logits = torch.from_numpy(golden_arrays()[f"{case['case']}/logits"])
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    kept = min(case["budget"], case["vocab"])
    log_probs = values[:, :kept] - logits.logsumexp(dim=-1, keepdim=True)
    return log_probs.unsqueeze(0), ids[:, :kept].unsqueeze(0)


def draft(streams, depth, width, *, vocab=64, scale=3.0, seed=0, levels=None):
    """Return a random draft's top `width`; `levels` rounds log-probabilities so that exact ties abound."""
    logits = torch.randn(streams, depth, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    log_probs, ids = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    if levels:
        log_probs = (log_probs * levels).floor() / levels
    return log_probs[..., :width].contiguous(), ids[..., :width].contiguous()


def rows(values, ids=None):
    """Return one stream's log_probs [1, L, K] and token_ids from nested lists."""
    log_probs = torch.tensor([values], dtype=torch.float32)
    if ids is None:
        ids = [list(range(10, 10 + len(row))) for row in values]
    return log_probs, torch.tensor([ids])


def paths(tree, stream=0, field="token"):
    """Return every node's tuple of tokens (or ranks) from the root, in row order, the root's () first."""
    values, parent = getattr(tree, field)[stream].tolist(), tree.parent[stream].tolist()
    found = [()]
    for row in range(1, int(tree.num_nodes[stream])):
        found.append((*found[parent[row]], values[row]))
    return found


def enumerate_all(log_probs, budget):
    """Return [(score, ranks)] of the best `budget` nodes by scoring every rank tuple of every depth."""
    table = log_probs.double().tolist()
    nodes = []
    for depth in range(1, len(table) + 1):
        for ranks in itertools.product(range(len(table[0])), repeat=depth):
            score = 0.0
            for row, rank in zip(table, ranks, strict=False):
                score += row[rank]
            nodes.append((-score, ranks))
    nodes.sort()
    return [(-negative, ranks) for negative, ranks in nodes[:budget]]


def sample_tree(streams=2, depth=4, width=6, budget=20, seed=0):
    return build_best_first(*draft(streams, depth, width, seed=seed), budget)


def same(left, right, *, apart_from=()):
    """Return whether two trees agree in every array, those named in `apart_from` left out."""
    names = [name for name in left.__slots__ if name not in ("depth_limit", *apart_from)]
    return left.depth_limit == right.depth_limit and all(
        torch.equal(getattr(left, name).int(), getattr(right, name).int())
        if name == "ancestors"
        else torch.equal(getattr(left, name), getattr(right, name))
        for name in names
    )
