"""A pair at given shapes with random weights, made on the device: a round costs the same whatever their values."""

import math

import torch
from torch import Tensor

from kdlab.config import INT4_GROUP, DrafterConfig, TargetConfig
from kdlab.model.drafter import Drafter
from kdlab.model.ids_only import TokenIdsOnly
from kdlab.model.layers import Part
from kdlab.model.pair import Pair
from kdlab.model.ranks import Ranks
from kdlab.model.target import Target

_INT4_SPREAD = 4.6  # standard deviation of whole numbers drawn evenly from -8..7


def random_pair(
    target_config: TargetConfig,
    drafter_config: DrafterConfig | None,
    *,
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Pair:
    """Make one rank's slice of a pair, experts as INT4 words where the config says so.

    Args:
        target_config, drafter_config: the constants; no drafter for AR alone.
        ranks: the rank whose slice is made.
        device: of the weights.
        dtype: of weights and activations.
        seed: of the draws.

    Raises:
        UnsupportedDevice: there is no room for the weights.
    """
    target = Target(target_config, dtype=dtype, device=device, packed=target_config.experts_int4, ranks=ranks)
    drafter = None
    if drafter_config is not None:
        drafter = Drafter(drafter_config, dtype=dtype, device=device, ranks=ranks)
    generator = torch.Generator(device).manual_seed(seed)
    for views in (target.views(), {} if drafter is None else drafter.views()):
        for name, part in views.items():
            _fill(name, part, generator)
    digest = f"random weights, seed {seed}"
    return Pair(
        target=target.eval(),
        drafter=None if drafter is None else drafter.eval(),
        tokenizer=TokenIdsOnly(target_config.vocab_size, frozenset(), "random weights"),
        name="random weights",
        target_sha256=digest,
        drafter_sha256=None if drafter is None else digest,
        device=device,
        dtype=dtype,
    )


def _fill(name: str, part: Part, generator: torch.Generator) -> None:
    """Draw values that keep a residual stream's size about 1 through all layers."""
    view: Tensor = part.view
    if not view.numel():
        return
    if view.dtype == torch.int32:
        view.random_(-(2**31), 2**31 - 1, generator=generator)
    elif name.endswith("weight_scale"):
        inner = part.shape[-1] * INT4_GROUP
        view.fill_(1.0 / (_INT4_SPREAD * math.sqrt(inner)))
    elif view.dim() == 1:
        view.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        view.normal_(0.0, 1.0 / math.sqrt(part.shape[-1]), generator=generator)
