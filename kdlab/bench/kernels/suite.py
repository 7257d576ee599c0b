"""Which cases the kernel benchmark has: all, the few of a short run, and the small ones that check every arm first."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from kdlab.bench.kernels import attention_cases, cache_cases, layer_cases, logits_cases, moe_cases, tree_cases
from kdlab.bench.kernels.case import EXPERT_WIDTH, Case
from kdlab.checks import check_choice
from kdlab.errors import ArgumentError

HEADS = (64, 8)
"""All heads of Kimi K2.6, and those of one rank of 8."""

_PER_HEADS = ("verify_attention", "moe_int4", "norm_rope", "skinny_linear")
"""What depends on how many ranks share a layer; the others are the same on every rank and are timed once."""

_CASES: dict[str, Callable[[int], Iterator[Case]]] = {
    "draft_topk": lambda heads: logits_cases.topk_cases(),
    "tree_build": lambda heads: tree_cases.build_cases(),
    "verify_attention": attention_cases.attention_cases,
    "target_sample": lambda heads: logits_cases.sample_cases(),
    "tree_accept": lambda heads: tree_cases.accept_cases(),
    "kv_commit": lambda heads: cache_cases.commit_cases(),
    "moe_int4": lambda heads: moe_cases.moe_cases(EXPERT_WIDTH * heads // max(HEADS)),
    "norm_rope": cache_cases.norm_rope_cases,
    "skinny_linear": layer_cases.linear_cases,
    "add_norm": lambda heads: layer_cases.norm_cases(),
    "router": lambda heads: layer_cases.router_cases(),
}
OPS = tuple(_CASES)


def cases_of(op: str, heads: tuple[int, ...]) -> list[Case]:
    """Return every case of an op once, those of a short run among them; nothing is allocated yet."""
    found = in_turns(list(_CASES[op](some)) for some in (heads if op in _PER_HEADS else heads[:1]))
    return list({case.name: case for case in found}.values())  # what every rank holds whole is the same at any heads


def in_turns(lists: Iterable[Sequence[Case]]) -> list[Case]:
    """Return the first of each list, the second of each, and so on: where time runs out, the start of all is done."""
    return [case for turn in zip_longest(*lists) for case in turn if case is not None]


def check_some(name: str, chosen: Sequence[object], known: Sequence[object]) -> None:
    """Raise ArgumentError unless `chosen` are some of `known`."""
    if isinstance(chosen, str) or not chosen:
        raise ArgumentError(name, "some of " + ", ".join(map(str, known)), chosen or "none")
    for value in chosen:
        check_choice(name, value, known)


def checks_of(op: str, heads: tuple[int, ...]) -> list[Case]:
    """Return small cases whose results are compared with float64 before an arm is timed."""
    return [case for some in (heads if op in _PER_HEADS else heads[:1]) for case in _checks(op, some)]


def _checks(op: str, heads: int) -> Iterator[Case]:
    if op == "draft_topk":
        yield logits_cases.topk_case(2, 3, 5000, 64)
    elif op == "target_sample":
        for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.95)):
            yield logits_cases.sample_case(9, 5000, temperature, top_p)
    elif op == "tree_build":
        for spread in ("peaked", "flat"):
            yield tree_cases.build_case(2, 64, spread)
    elif op == "tree_accept":
        yield tree_cases.accept_case(2, 33)
    elif op == "verify_attention":
        for streams, rows, prefix in ((2, 9, 100), (1, 33, 4096)):
            yield attention_cases.attention_case(streams, rows, prefix, heads)
    elif op == "kv_commit":
        yield cache_cases.commit_case(2, 5, layers=3, tap_width=64)
    elif op == "norm_rope":
        yield cache_cases.norm_rope_case(2, 9, heads)
    elif op == "skinny_linear":
        yield layer_cases.linear_case("o_proj", 9, 512, 256)
        yield layer_cases.matmul_case("W_UK", 9, 512, 128, heads)
        yield layer_cases.matmul_case("W_UV", 9, 128, 512, heads)
    elif op == "add_norm":
        for update in (True, False):
            yield layer_cases.norm_case(9, 1536, update=update)
    elif op == "router":
        yield layer_cases.router_case(9)
    elif op == "moe_int4":
        weights = moe_cases.Weights(EXPERT_WIDTH * heads // max(HEADS), 16)
        for rows, shared in ((5, False), (33, False), (5, True)):
            yield moe_cases.moe_case(rows, weights, shared=shared)
