"""Cases of a layer's small ops: products of a few rows, residual addition with norm, the router."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kdlab.bench.kernels.case import (
    EXPERTS_A_TOKEN,
    HIDDEN,
    LATENT,
    NUM_EXPERTS,
    Arm,
    Case,
    Inputs,
    normal,
    relative_error,
    wrong_share,
)
from kdlab.kernels import reference
from kdlab.kernels.add_norm import add_norm, add_norm_cost
from kdlab.kernels.router import router, router_cost
from kdlab.kernels.skinny_linear import skinny_linear, skinny_linear_cost, skinny_matmul

_QUERY_RANK, _NOPE, _ROPE, _VALUE = 1536, 128, 64, 128
_ROWS = (1, 8, 33, 64)
_EPS, _SCALE = 1e-5, 2.827


def linear_cases(heads: int) -> Iterator[Case]:
    """The products around one layer's attention, with the heads of one rank."""
    shapes = {
        "q_a and kv_a": (_QUERY_RANK + LATENT + _ROPE, HIDDEN),
        "q_b": (heads * (_NOPE + _ROPE), _QUERY_RANK),
        "o_proj": (HIDDEN, heads * _VALUE),
    }
    for rows in _ROWS:
        for name, (features, inputs) in shapes.items():
            yield linear_case(name, rows, features, inputs, default=rows == 33)
        yield matmul_case("W_UK", rows, LATENT, _NOPE, heads, default=rows == 33)
        yield matmul_case("W_UV", rows, _VALUE, LATENT, heads, default=rows == 33)


def linear_case(name: str, rows: int, features: int, inputs: int, *, default: bool = True) -> Case:
    """One matrix, beside cuBLAS."""

    def make(seed: int) -> Inputs:
        weight = normal(features, inputs, seed=seed + 1, std=inputs**-0.5)
        return {"x": normal(rows, inputs, seed=seed), "weight": weight}

    def error(inputs: Inputs, out: Tensor) -> float:
        return relative_error(out, inputs["x"].double() @ inputs["weight"].double().mT)

    arms = {
        "cuda": Arm(lambda inputs: skinny_linear(**inputs, impl="cuda"), error, 1e-2, goal=True),
        "cublas": Arm(lambda inputs: reference.skinny_linear(**inputs), error, 1e-2, own=False),
    }
    cost = skinny_linear_cost(rows, features, inputs)
    sizes = {"of": name, "rows": rows, "features": features, "inputs": inputs}
    return Case("skinny_linear", sizes, make, arms, lambda _: cost, cost.bytes, default)


def matmul_case(name: str, rows: int, features: int, inputs: int, heads: int, *, default: bool = True) -> Case:
    """A matrix a head, beside cuBLAS; W_UK as it lies in kv_b, outputs side by side."""

    def make(seed: int) -> Inputs:
        shape = (heads, inputs, features) if name == "W_UK" else (heads, features, inputs)
        weight = normal(*shape, seed=seed + 1, std=inputs**-0.5)
        return {"x": normal(heads, rows, inputs, seed=seed), "weight": weight if name == "W_UK" else weight.mT}

    def error(inputs: Inputs, out: Tensor) -> float:
        return relative_error(out, inputs["x"].double() @ inputs["weight"].double())

    arms = {
        "cuda": Arm(lambda inputs: skinny_matmul(**inputs, impl="cuda"), error, 1e-2, goal=True),
        "cublas": Arm(lambda inputs: torch.bmm(inputs["x"], inputs["weight"]), error, 1e-2, own=False),
    }
    cost = skinny_linear_cost(rows, features, inputs, matrices=heads)
    sizes = {"of": name, "rows": rows, "features": features, "inputs": inputs, "heads": heads}
    return Case("skinny_linear", sizes, make, arms, lambda _: cost, cost.bytes, default)


def norm_cases() -> Iterator[Case]:
    """The residual stream's norm with its addition, and the norm of the low-rank query."""
    for rows in _ROWS:
        yield norm_case(rows, HIDDEN, update=True, default=rows == 33)
        yield norm_case(rows, _QUERY_RANK, update=False, default=rows == 33)


def norm_case(rows: int, width: int, *, update: bool, default: bool = True) -> Case:
    """add_norm beside torch."""

    def make(seed: int) -> Inputs:
        added = normal(rows, width, seed=seed + 1) if update else None
        return {"x": normal(rows, width, seed=seed), "update": added, "weight": normal(width, seed=seed + 2)}

    def error(inputs: Inputs, out: tuple[Tensor, Tensor]) -> float:
        total = reference.add_norm(**inputs, eps=_EPS)[0].double()
        exact = reference.add_norm(total, None, inputs["weight"].double(), _EPS)
        return max(relative_error(part, best) for part, best in zip(out, exact, strict=True))

    arms = {
        "cuda": Arm(lambda inputs: add_norm(**inputs, eps=_EPS, impl="cuda"), error, 1e-2, goal=True),
        "torch": Arm(lambda inputs: reference.add_norm(**inputs, eps=_EPS), error, 1e-2, own=False),
    }
    cost = add_norm_cost(rows, width, update=update)
    sizes = {"rows": rows, "width": width, "update": update}
    return Case("add_norm", sizes, make, arms, lambda _: cost, cost.bytes, default)


def router_cases() -> Iterator[Case]:
    """One layer's router."""
    for rows in _ROWS:
        yield router_case(rows, default=rows == 33)


def router_case(rows: int, *, default: bool = True) -> Case:
    """The router beside torch; a near-tie may fall either way, and moves one choice."""

    def make(seed: int) -> Inputs:
        return {
            "x": normal(rows, HIDDEN, seed=seed),
            "weight": normal(NUM_EXPERTS, HIDDEN, seed=seed + 1, std=HIDDEN**-0.5),
            "bias": normal(NUM_EXPERTS, seed=seed + 2, std=0.1, dtype=torch.float32),
        }

    def run(inputs: Inputs, impl: str = "cuda") -> tuple[Tensor, Tensor]:
        return router(**inputs, k=EXPERTS_A_TOKEN, scale=_SCALE, impl=impl)

    def plain(inputs: Inputs) -> tuple[Tensor, Tensor]:
        return run(inputs, "reference")

    def error(inputs: Inputs, out: tuple[Tensor, Tensor]) -> float:
        wide = {name: value.double() for name, value in inputs.items()}
        return wrong_share(out[0], plain(wide)[0])

    arms = {"cuda": Arm(run, error, 0.02, goal=True), "torch": Arm(plain, error, 0.02, own=False)}
    cost = router_cost(rows, HIDDEN, NUM_EXPERTS, EXPERTS_A_TOKEN)
    return Case("router", {"rows": rows}, make, arms, lambda _: cost, cost.bytes, default)
