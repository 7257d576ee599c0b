"""A pair at given shapes with random weights, made on the device: a round costs the same whatever their values."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kdlab.checks import check_int
from kdlab.config import INT4_GROUP, DrafterConfig, TargetConfig
from kdlab.model.drafter import Drafter
from kdlab.model.ids_only import TokenIdsOnly
from kdlab.model.layers import Part
from kdlab.model.pair import Pair
from kdlab.model.ranks import EXPERT_MODES, Ranks
from kdlab.model.target import Target
from kdlab.paths import K26_SHAPES

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


def k26_configs(layers: int | None) -> tuple[TargetConfig, DrafterConfig]:
    """Return the constants of Kimi K2.6 and its drafter, of all layers or the first `layers`."""
    target, drafter = TargetConfig.load(K26_SHAPES / "target"), DrafterConfig.load(K26_SHAPES / "drafter")
    if layers is None:
        return target, drafter
    check_int("layers", layers, minimum=1, maximum=target.num_hidden_layers)
    taps = tuple(layer * (layers - 1) // (target.num_hidden_layers - 1) for layer in drafter.target_layer_ids)
    return (
        replace(target, num_hidden_layers=layers),
        replace(drafter, num_target_layers=layers, target_layer_ids=taps),
    )


def k26_pair(ranks: Ranks, layers: int | None, device: torch.device) -> Pair:
    """Return a rank's slice of Kimi K2.6 and its drafter with random weights, see `k26_configs`."""
    return random_pair(*k26_configs(layers), ranks=ranks, device=device)


def check_k26(ranks: int, experts: str | None, layers: int | None, *, running: int = 1) -> None:
    """Raise ArgumentError for a slice that `k26_pair` would refuse, without a GPU: before one is looked for.

    Args:
        ranks, layers: of `k26_pair`.
        experts: how they are split; None takes both ways.
        running: of the ranks.
    """
    check_int("ranks", ranks, minimum=running)
    target, drafter = k26_configs(1 if layers is None else layers)
    for split in EXPERT_MODES if experts is None else (experts,):
        shared: dict[str, Any] = {"dtype": torch.bfloat16, "ranks": Ranks.slice_of(0, ranks, split)}
        Target(target, device=torch.device("meta"), packed=target.experts_int4, **shared)
        Drafter(drafter, device=torch.device("meta"), **shared)


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
