"""Routing by plan: which experts each row asks for, so that the rows together touch a chosen number of them."""

from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from kdlab.checks import check_int
from kdlab.model.moe import MixtureOfExperts, Router
from kdlab.model.target import Target
from kdlab.study.experts import busiest_rank


def planned_ids(
    tokens: int, distinct: int, num_experts: int, per_token: int, seed: int, held: tuple[int, int] | None = None
) -> np.ndarray:
    """Return expert ids [tokens, per_token] i32: each row's differ, and together they are `distinct` experts.

    Args:
        tokens: T rows.
        distinct: experts in all, per_token to min(T * per_token, num_experts); each is picked about equally often.
        num_experts: E.
        per_token: k.
        seed: of the draw.
        held: (n, m): m of the experts are among the first n, which a rank holds; None leaves that to chance.

    Raises:
        ArgumentError: so many rows cannot touch so many experts.
    """
    check_int("distinct", distinct, minimum=per_token, maximum=min(tokens * per_token, num_experts))
    draw = np.random.default_rng(seed)
    pool = draw.permutation(num_experts)[:distinct]
    if held is not None:
        first, own = held
        check_int("held", own, minimum=max(0, distinct - num_experts + first), maximum=min(first, distinct))
        others = first + draw.permutation(num_experts - first)[: distinct - own]
        pool = draw.permutation(np.concatenate([draw.permutation(first)[:own], others]))
    # Consecutive places of a ring of at least k experts differ, and the ring is gone round at least once.
    places = np.arange(tokens * per_token) % distinct
    return pool[places].reshape(tokens, per_token)[draw.permutation(tokens)].astype(np.int32)


class PlannedRouter(nn.Module):
    """A router that does its work and then returns planned ids with the weights it found."""

    def __init__(self, router: Router, ids: Tensor) -> None:
        super().__init__()
        self.router, self.ids = router, ids

    def forward(self, x: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        """Route rows x [T, D]; the ids are the plan's first T rows, in the dtype of the router's own."""
        found, weights = self.router(x, *args)
        return self.ids[: len(x)].to(found.dtype), weights


def plan_routing(target: Target, tokens: int, distinct: float, seed: int = 0) -> None:
    """Give every MoE layer a plan for `tokens` rows, in place of the one it has.

    Args:
        target: its routers are wrapped. With whole experts a rank, its rank is made the busiest, as the step waits for
            that one.
        tokens: T, rows of all streams.
        distinct: experts to touch, over all ranks; between whole numbers some layers touch one more.
        seed: of the draws; layers differ.
    """
    config, ranks = target.config, target.ranks
    size = (config.n_routed_experts, config.num_experts_per_tok)
    whole = ranks.experts == "ep" and ranks.size > 1
    own = busiest_rank(distinct, ranks.size, size[0]) if whole else 0.0
    blocks = [layer.mlp for layer in target.layers if isinstance(layer.mlp, MixtureOfExperts)]
    for place, block in enumerate(blocks):
        share = (place + 0.5) / len(blocks)
        held = (size[0] // ranks.size, int(own + share)) if whole else None
        ids = planned_ids(tokens, max(size[1], int(distinct + share)), *size, seed + place, held)
        router = block.router.router if isinstance(block.router, PlannedRouter) else block.router
        planned = PlannedRouter(router, torch.from_numpy(ids).to(target.embedding.device))
        block.router = cast("Router", planned)
