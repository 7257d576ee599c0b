"""Distinct experts against rows, counted in recorded rounds: rows of a tree, of a chain, siblings, text, strangers.

Rows that share a context may ask for the same experts, and how much so decides what a tree costs. Each kind below is a
way to pick n rows; what is counted is the distinct experts that they use together, layer by layer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pandas as pd

from kdlab.checks import check_choice, check_int
from kdlab.decode.records import RoundRecord
from kdlab.errors import ArgumentError
from kdlab.study.experts import count_distinct, fit_g

KINDS = ("tree", "chain", "siblings", "text", "strangers")
_DRAWS = 200

Ids = np.ndarray  # [layers, rows, k] int


def expert_curve(rounds: Sequence[RoundRecord], kind: str, rows: Iterable[int], *, seed: int = 0) -> pd.DataFrame:
    """Count the distinct experts of n rows, over many picks.

    Args:
        rounds: with expert ids, from `generate(..., record_experts=True)`.
        kind: "tree" (the best n rows of a tree), "chain" (its most likely path), "siblings" (children of one node),
            "text" (tokens that follow one another in the output) or "strangers" (rows of different rounds).
        rows: numbers n.
        seed: of the draw of strangers.

    Returns:
        One row a layer and n for which there are picks: kind, rows, layer, distinct (mean over picks), p10, p90, picks.

    Raises:
        ArgumentError: rounds without expert ids, or an unknown kind.
    """
    check_choice("kind", kind, KINDS)
    if not rounds or any(one.expert_ids is None for one in rounds):
        raise ArgumentError("rounds", "at least one, all with expert ids (record_experts=True)", len(rounds))
    found = []
    for count in rows:
        check_int("rows", count, minimum=1)
        picks = list(_PICKS[kind](rounds, count, np.random.default_rng(seed)))
        if not picks:
            continue
        used = np.stack([count_distinct(ids) for ids in picks])  # [picks, layers]
        low, high = np.percentile(used, [10, 90], axis=0)
        for layer, mean in enumerate(used.mean(axis=0)):
            found.append((kind, count, layer, float(mean), float(low[layer]), float(high[layer]), len(picks)))
    return pd.DataFrame(found, columns=["kind", "rows", "layer", "distinct", "p10", "p90", "picks"])


def exponents(curves: pd.DataFrame, *, num_experts: int, per_token: int) -> pd.DataFrame:
    """Return the exponent g of each kind and layer: U = E (1 - (1 - k/E)^(n^g)), see `fit_g`.

    Args:
        curves: of `expert_curve`, with a number of rows above 1; numbers that use all experts say nothing of g.
        num_experts: E.
        per_token: k.
    """
    found = []
    for (kind, layer), group in curves.groupby(["kind", "layer"], sort=False):
        told = group[(group["rows"] > 1) & (group["distinct"] < 0.98 * num_experts)]
        if len(told):
            g = fit_g(told["rows"], told["distinct"], num_experts=num_experts, per_token=per_token)
            found.append((kind, layer, g))
    return pd.DataFrame(found, columns=["kind", "layer", "g"])


def _ids(one: RoundRecord) -> Ids:
    if one.expert_ids is None:
        raise ArgumentError("rounds", "expert ids in every round", "none")
    return one.expert_ids


def _tree(rounds: Sequence[RoundRecord], count: int, draw: np.random.Generator) -> Iterator[Ids]:
    for one in rounds:
        if _ids(one).shape[1] >= count:
            yield _ids(one)[:, :count]


def _chain(rounds: Sequence[RoundRecord], count: int, draw: np.random.Generator) -> Iterator[Ids]:
    for one in rounds:
        rank, parent = one.tree.rank[0].tolist(), one.tree.parent[0].tolist()
        path = [0]
        for row in range(1, _ids(one).shape[1]):
            if parent[row] == path[-1] and rank[row] == 0:
                path.append(row)
        if len(path) >= count:
            yield _ids(one)[:, path[:count]]


def _siblings(rounds: Sequence[RoundRecord], count: int, draw: np.random.Generator) -> Iterator[Ids]:
    for one in rounds:
        parent = one.tree.parent[0].numpy()[: _ids(one).shape[1]]
        for node in np.unique(parent[1:]):
            children = np.flatnonzero(parent == node)
            if len(children) >= count:
                yield _ids(one)[:, children[:count]]


def _text(rounds: Sequence[RoundRecord], count: int, draw: np.random.Generator) -> Iterator[Ids]:
    by_prompt: dict[int, list[Ids]] = {}
    for one in rounds:
        by_prompt.setdefault(one.prompt, []).append(_ids(one)[:, list(one.path)])
    for parts in by_prompt.values():
        ids = np.concatenate(parts, axis=1)
        for first in range(0, ids.shape[1] - count + 1, count):
            yield ids[:, first : first + count]


def _strangers(rounds: Sequence[RoundRecord], count: int, draw: np.random.Generator) -> Iterator[Ids]:
    if len(rounds) < count:
        return
    for _ in range(_DRAWS):
        chosen = draw.choice(len(rounds), count, replace=False)
        yield np.stack([_ids(rounds[index])[:, 0] for index in chosen], axis=1)


_PICKS: dict[str, Callable[[Sequence[RoundRecord], int, np.random.Generator], Iterator[Ids]]] = {
    "tree": _tree,
    "chain": _chain,
    "siblings": _siblings,
    "text": _text,
    "strangers": _strangers,
}
