"""What stands inside a stage of a round, by itself: the last norm, and the shared expert as a dense layer runs it."""

from collections.abc import Callable

import torch

from kdlab.kernels.add_norm import add_norm
from kdlab.kernels.stage import stage
from kdlab.model.moe import MixtureOfExperts
from kdlab.model.target import Target


def part_work(target: Target, tokens: int) -> Callable[[], None]:
    """Return a call that runs each part of `kdlab.study.step_cost.round_parts` in a stage of its name.

    The norm is the round's own kernel. The shared expert is no stage of its own in a round: `moe_int4` has it in the
    kernels of the routed ones, or from MANY_ROWS rows on in kernels beside theirs. Here its weights go through the ops
    of a dense layer.

    Args:
        target: whose weights are read, those of all layers.
        tokens: T, random rows of the residual stream.
    """
    x, update = torch.randn(2, tokens, *target.norm.shape, dtype=target.norm.dtype, device=target.norm.device)
    mixtures = [layer.mlp for layer in target.layers if isinstance(layer.mlp, MixtureOfExperts)]
    shared = [mixture.shared for mixture in mixtures if mixture.shared is not None]

    def final_norm() -> None:
        add_norm(x, update, target.norm, target.config.rms_norm_eps)

    def shared_expert() -> None:
        for expert in shared:
            expert(x, "auto")

    def work() -> None:
        for name, run in (("final norm", final_norm), ("shared expert", shared_expert)):
            with stage(name):
                run()

    return work
