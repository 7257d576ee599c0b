"""Cases of the ops on draft trees: tree_build and tree_accept."""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from kdlab.bench.kernels.case import DEPTH_LIMIT, TOP_K, VOCAB_SIZE, Arm, Case, Inputs, wrong_share
from kdlab.kernels.tree_accept import tree_accept, tree_accept_cost
from kdlab.kernels.tree_build import tree_build, tree_build_cost
from kdlab.tree import DraftTree, accept, build_best_first

_SPREADS = {"peaked": 4.0, "flat": 0.05}
"""Standard deviation of the candidates' logits: a draft that is sure of itself, and one that knows nothing."""
_BUDGETS, _LONG_BUDGETS = (64, 256, 1024), (16, 32, 128, 512)
_SHORT_HOST_NODES, _MOST_HOST_NODES = 512, 2048  # beyond them the heap takes milliseconds, and tens of them
_FIELDS = ("token", "parent", "depth", "logp", "rank", "num_nodes", "ancestors", "first_child", "next_sibling")


def build_cases() -> Iterator[Case]:
    """Best-first trees by budget, shape of the draft and streams."""
    for budget in (*_BUDGETS, *_LONG_BUDGETS):
        for spread in _SPREADS:
            for streams in (1, 8):
                default = budget in _BUDGETS and (streams == 1 or spread == "peaked")
                yield build_case(streams, budget, spread, default=default)


def build_case(
    streams: int, budget: int, spread: str, depth: int = DEPTH_LIMIT, k: int = TOP_K, *, default: bool = True
) -> Case:
    """tree_build beside the heap on the host with its copies, as engines build trees today."""

    def make(seed: int) -> Inputs:
        log_probs, token_ids = candidates(streams, depth, k, spread, seed)
        return {"log_probs": log_probs.cuda(), "token_ids": token_ids.cuda()}

    def host(inputs: Inputs) -> DraftTree:
        return build_best_first(inputs["log_probs"].cpu(), inputs["token_ids"].cpu(), budget)

    def error(inputs: Inputs, out: object) -> float:
        exact = host(inputs)
        return max(wrong_share(_plain(getattr(out, name)), _plain(getattr(exact, name))) for name in _FIELDS)

    arms = {"cuda": Arm(lambda inputs: tree_build(inputs["log_probs"], inputs["token_ids"], budget), error, goal=True)}
    if streams * budget <= _MOST_HOST_NODES:
        quick = streams * budget <= _SHORT_HOST_NODES
        arms["host heap"] = Arm(lambda inputs: host(inputs).to("cuda"), error, graph=False, own=False, short=quick)
    sizes = {"streams": streams, "budget": budget, "draft": spread, "depth": depth, "k": k}
    cost = tree_build_cost(streams, depth, k, budget)
    return Case("tree_build", sizes, make, arms, lambda _: cost, cost.bytes, default)


def accept_cases() -> Iterator[Case]:
    """Eight streams of 64 nodes, and the ends of the range."""
    yield accept_case(8, 64)
    for streams, rows in ((1, 64), (8, 1025)):
        yield accept_case(streams, rows, default=False)


def accept_case(streams: int, rows: int, *, default: bool = True) -> Case:
    """tree_accept beside the walk in torch on the host, with its copies."""

    def make(seed: int) -> Inputs:
        tree = draft_tree(streams, rows)
        followed = tree.token.gather(1, tree.first_child.clamp(min=0).long())
        lost = torch.rand(tree.token.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
        target = torch.where(lost | (tree.first_child < 0), VOCAB_SIZE, followed).int()
        return {"tree": tree.to("cuda"), "target": target.cuda()}

    def device(inputs: Inputs) -> object:
        tree = inputs["tree"]
        links = (tree.token, tree.parent, tree.depth, tree.first_child, tree.next_sibling, tree.num_nodes)
        return tree_accept(*links, inputs["target"], tree.depth_limit)

    def host(inputs: Inputs) -> object:
        found = accept(inputs["tree"].to("cpu"), inputs["target"].cpu())
        return [part.cuda() for part in (found.path, found.length, found.bonus, found.status)]

    def error(inputs: Inputs, out: object) -> float:
        return max(wrong_share(part, exact) for part, exact in zip(out, host(inputs), strict=True))  # type: ignore[call-overload]

    arms = {
        "cuda": Arm(device, error, goal=True),
        "host walk": Arm(host, error, graph=False, own=False),
    }
    cost = tree_accept_cost(streams, rows, DEPTH_LIMIT)
    sizes = {"streams": streams, "rows": rows, "depth": DEPTH_LIMIT}
    return Case("tree_accept", sizes, make, arms, lambda _: cost, cost.bytes, default)


def candidates(streams: int, depth: int, k: int, spread: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [S, L, K] f32, descending, and distinct token ids [S, L, K] i32, on the CPU."""
    random = torch.Generator().manual_seed(seed)
    logits = _SPREADS[spread] * torch.randn(streams, depth, k, generator=random)
    token_ids = torch.rand(streams, depth, 8 * k, generator=random).topk(k).indices
    return logits.sort(descending=True).values.log_softmax(-1), token_ids.int()


@lru_cache(maxsize=8)
def draft_tree(streams: int, rows: int) -> DraftTree:
    """Return trees of so many rows on the CPU, from a peaked draft."""
    return build_best_first(*candidates(streams, DEPTH_LIMIT, TOP_K, "peaked", seed=streams * rows), rows - 1)


def _plain(value: Tensor) -> Tensor:
    """Unsigned words as signed ones: torch compares no uint32 on a GPU."""
    return value.view(torch.int32).cpu() if value.dtype == torch.uint32 else value.cpu()
