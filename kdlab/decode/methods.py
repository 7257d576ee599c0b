"""The decoding methods: each is a tree builder and the top K that it needs from the drafter."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_int
from kdlab.errors import ArgumentError
from kdlab.kernels.tree_build import tree_build_impl
from kdlab.tree import MAX_BUDGET, DraftTree, build_beam, build_best_first, build_chain

_GPU = torch.device("cuda")
METHODS = ("ar", "chain", "ddtree", "beam")

Builder = Callable[[Tensor, Tensor], DraftTree]  # log_probs [S, L, K] float32, token_ids [S, L, K] int32


@dataclass(frozen=True, slots=True)
class Method:
    """How a round's tree is made.

    Attributes:
        name: one of METHODS.
        budget: tree nodes without the root; verify rows are budget + 1.
        width: nodes kept a depth, beam only.
        top_k: draft candidates a slot; 0 for AR, which runs no drafter.
        build: the tree builder, or None for AR.
        builds_on_gpu: on a GPU the trees are built there; else the host builds them.
    """

    name: str
    budget: int
    width: int | None
    top_k: int
    build: Builder | None
    builds_on_gpu: bool


def check_method(name: str, budget: int, width: int | None) -> tuple[int, int | None]:
    """Return budget and width of a method, or raise ArgumentError: what `make_method` checks without a pair."""
    check_choice("method", name, METHODS)
    budget = check_int("budget", budget, minimum=0, maximum=MAX_BUDGET)
    if (width is not None) != (name == "beam"):
        raise ArgumentError("width", "a width for method 'beam' and None for the others", f"{width} for {name!r}")
    return budget, None if width is None else check_int("width", width, minimum=1)


def make_method(
    name: str,
    *,
    budget: int,
    width: int | None,
    top_k: int | None,
    depth_limit: int,
    vocab_size: int,
    impl: str = "auto",
) -> Method:
    """Check the arguments of a method and make it.

    Args:
        name: "ar" (the root alone), "chain" (the draft's top path, at most `budget` long), "ddtree" (the best tree of
            `budget` nodes) or "beam" (the `width` best nodes a depth, the best `budget` of them).
        budget: tree nodes without the root, 0 to MAX_BUDGET.
        width: for "beam" alone, >= 1.
        top_k: draft candidates a slot; None takes what the tree can use: 1, min(budget, V) or min(width, V).
        depth_limit: L, draft positions of the drafter.
        vocab_size: V.
        impl: of `build_best_first` and `build_chain`.

    Raises:
        ArgumentError: an argument is out of range, or a width comes with another method than "beam".
    """
    budget, width = check_method(name, budget, width)
    if top_k is not None:
        top_k = check_int("top_k", top_k, minimum=1, maximum=vocab_size)
    if name == "ar":
        return Method(name, 0, None, 0, None, True)

    def fits_kernel(candidates: int) -> bool:
        return impl != "reference" and tree_build_impl(depth_limit, candidates, budget, _GPU) != "reference"

    if name == "chain":
        budget, candidates = min(budget, depth_limit), top_k or 1
        chain = partial(build_chain, length=budget, vocab_size=vocab_size, impl=impl)
        return Method(name, budget, None, candidates, chain, fits_kernel(candidates))
    if width is None:
        candidates = top_k or max(1, min(budget, vocab_size))
        best = partial(build_best_first, budget=budget, vocab_size=vocab_size, impl=impl)
        return Method(name, budget, None, candidates, best, fits_kernel(candidates))
    budget, candidates = min(budget, width * depth_limit), top_k or min(width, vocab_size)
    beam = partial(build_beam, width=width, budget=budget, vocab_size=vocab_size)
    return Method(name, budget, width, candidates, beam, False)
