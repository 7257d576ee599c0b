"""Routing by plan: which experts each row asks for, so that the rows together touch a chosen number of them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from kdlab.checks import check_int
from kdlab.errors import ArgumentError
from kdlab.model.moe import MixtureOfExperts, Router
from kdlab.model.target import Target


def planned_ids(tokens: int, distinct: int, num_experts: int, per_token: int, seed: int) -> np.ndarray:
    """Return expert ids [tokens, per_token] i32: each row's differ, and together they are `distinct` experts.

    Args:
        tokens: T rows.
        distinct: experts in all, per_token to min(T * per_token, num_experts); each is picked about equally often.
        num_experts: E.
        per_token: k.
        seed: of the draw.

    Raises:
        ArgumentError: so many rows cannot touch so many experts.
    """
    check_int("distinct", distinct, minimum=per_token, maximum=min(tokens * per_token, num_experts))
    draw = np.random.default_rng(seed)
    pool = draw.permutation(num_experts)[:distinct]
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


def plan_routing(target: Target, tokens: int, distinct: Sequence[int], seed: int = 0) -> None:
    """Give every MoE layer a plan for `tokens` rows, in place of the one it has.

    Args:
        target: its routers are wrapped.
        tokens: T, rows of all streams.
        distinct: experts to touch, one number a MoE layer.
        seed: of the draws; layers differ.

    Raises:
        ArgumentError: as many numbers as MoE layers are wanted.
    """
    config = target.config
    blocks = [layer.mlp for layer in target.layers if isinstance(layer.mlp, MixtureOfExperts)]
    if len(distinct) != len(blocks):
        raise ArgumentError("distinct", f"one number for each of {len(blocks)} MoE layers", len(distinct))
    for place, (block, wanted) in enumerate(zip(blocks, distinct, strict=True)):
        ids = planned_ids(tokens, wanted, config.n_routed_experts, config.num_experts_per_tok, seed + place)
        router = block.router.router if isinstance(block.router, PlannedRouter) else block.router
        block.router = PlannedRouter(router, torch.from_numpy(ids).to(target.embedding.device))
