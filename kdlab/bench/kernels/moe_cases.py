"""Cases of moe_int4: one layer's experts at few rows, uniform routing, whole and on one rank of 8."""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from kdlab.bench.kernels.case import (
    EXPERT_WIDTH,
    EXPERTS_A_TOKEN,
    GROUP,
    HIDDEN,
    NUM_EXPERTS,
    Arm,
    Case,
    Inputs,
    generator,
    normal,
    relative_error,
)
from kdlab.kernels import reference
from kdlab.kernels.cost import Cost
from kdlab.kernels.experts import DenseExperts, PackedExperts
from kdlab.kernels.moe_int4 import moe_int4, moe_int4_cost

_ROWS, _DEFAULT_ROWS = (1, 8, 17, 33, 65), (1, 33)
_LIMIT = 3e-2  # of a row's error: bf16 weights, products and hidden values
_MOST_PEER_ROWS = 33


class Weights:
    """One layer's experts, made when they are first asked for: 9 GB at the whole width, and 34 GB in bfloat16."""

    def __init__(self, width: int, num_experts: int = NUM_EXPERTS) -> None:
        self.width, self.num_experts = width, num_experts

    @cached_property
    def packed(self) -> PackedExperts:
        """Random INT4 weights in the checkpoint's format."""
        width, count = self.width, self.num_experts
        return PackedExperts(
            _words(count, 2 * width, HIDDEN // 8, seed=1), _scales(count, 2 * width, HIDDEN // GROUP),
            _words(count, HIDDEN, width // 8, seed=2), _scales(count, HIDDEN, width // GROUP),
        )  # fmt: skip

    @cached_property
    def dense(self) -> DenseExperts:
        """As many experts in bfloat16, which is what cuBLAS reads."""
        return _dense(self.num_experts, self.width)

    @cached_property
    def shared(self) -> DenseExperts:
        """The one expert that every row runs through."""
        return _dense(1, self.width)


def moe_cases(width: int = EXPERT_WIDTH) -> Iterator[Case]:
    """Rows of AR and of trees, without and with the shared expert."""
    weights = Weights(width)
    for rows in _ROWS:
        yield moe_case(rows, weights, shared=False, default=rows in _DEFAULT_ROWS)
    yield moe_case(33, weights, shared=True, default=False)


def moe_case(rows: int, weights: Weights, *, shared: bool, default: bool = True) -> Case:
    """moe_int4 beside experts in bfloat16 by cuBLAS, grouped on the host."""

    def make(seed: int) -> Inputs:
        scores = torch.rand(rows, weights.num_experts, generator=generator(seed), device="cuda")
        chosen, expert_ids = scores.topk(EXPERTS_A_TOKEN)
        share = chosen / chosen.sum(-1, keepdim=True)
        return {"x": normal(rows, HIDDEN, seed=seed), "expert_ids": expert_ids.int(), "weights": share}

    def run(inputs: Inputs) -> Tensor:
        return moe_int4(**inputs, experts=weights.packed, shared=weights.shared if shared else None, impl="cuda")

    def error(inputs: Inputs, out: Tensor) -> float:
        x, expert_ids, share = inputs["x"].double(), inputs["expert_ids"], inputs["weights"].double()
        exact = reference.moe_experts(x, expert_ids, share, weights.packed)
        if shared:
            everyone = torch.zeros(rows, 1, dtype=torch.int32, device="cuda")
            exact += reference.moe_experts(x, everyone, torch.ones_like(everyone).double(), _widened(weights.shared))
        return relative_error(out, exact)

    def plain(inputs: Inputs) -> Tensor:
        shared_expert = weights.shared if shared else None
        return moe_int4(**inputs, experts=weights.packed, shared=shared_expert, impl="reference")

    def cublas(inputs: Inputs) -> Tensor:
        return reference.moe_experts(inputs["x"], inputs["expert_ids"], inputs["weights"], weights.dense)

    def cublas_error(inputs: Inputs, out: Tensor) -> float:
        x, share = inputs["x"].double(), inputs["weights"].double()
        return relative_error(out, reference.moe_experts(x, inputs["expert_ids"], share, _widened(weights.dense)))

    def cost(inputs: Inputs) -> Cost:
        return moe_int4_cost(inputs["expert_ids"], HIDDEN, weights.width, shared=shared)

    arms = {
        "cuda": Arm(run, error, _LIMIT, goal=True),
        "torch": Arm(plain, error, _LIMIT, own=False, timed=False),
    }
    if rows <= _MOST_PEER_ROWS and not shared:
        # The host groups the rows, so no graph can hold it.
        quick = weights.width < EXPERT_WIDTH  # 34 GB of weights take a second to make
        arms["cublas bf16"] = Arm(cublas, cublas_error, _LIMIT, graph=False, own=False, short=quick)
    distinct = min(weights.num_experts, rows * EXPERTS_A_TOKEN)
    sizes = {"streams": 1, "rows": rows, "width": weights.width, "shared": shared, "routing": "uniform"}
    return Case("moe_int4", sizes, make, arms, cost, distinct * 2 * HIDDEN * weights.width, default)


def _words(*shape: int, seed: int) -> Tensor:
    words = torch.empty(shape, dtype=torch.int32, device="cuda")
    return words.random_(-(2**31), 2**31 - 1, generator=generator(seed))


def _scales(*shape: int) -> Tensor:
    """Weights of some 0.02, as a trained matrix of this width has, so that the hidden values stay of size one."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").uniform_(0.002, 0.006, generator=generator(3))


def _widened(experts: DenseExperts) -> DenseExperts:
    return DenseExperts(experts.gate_up.double(), experts.down.double())


def _dense(count: int, width: int) -> DenseExperts:
    gate_up = normal(count, 2 * width, HIDDEN, seed=4, std=0.02)
    return DenseExperts(gate_up, normal(count, HIDDEN, width, seed=5, std=0.02))
