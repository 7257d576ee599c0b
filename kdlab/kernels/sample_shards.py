"""target_sample over vocabulary shards: what each rank computes, and what is done with the ranks' small results.

    mine       = target_sample_shard(my logits, ...)                 exchange: all gather it
    candidates = merge_candidates(everybody's)
    mass       = top_p_mass_shard(my logits, candidates, ...)        exchange: all add it up; only if top_p < 1
    tokens     = choose_token(candidates, mass, top_p=top_p)

Logits never leave their rank, and the number of exchanges does not depend on the data.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import check_float, check_int, check_shape
from kdlab.errors import ArgumentError, ShapeError
from kdlab.kernels import reference
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.logits import runs_kernel
from kdlab.kernels.reference import TOP_P_REACHED, SampleShard
from kdlab.kernels.target_sample import MAX_CANDIDATES, as_signed, check_sampling, launch, noise_arguments

__all__ = ["SampleShard", "choose_token", "merge_candidates", "target_sample_shard", "top_p_mass_shard"]

_NO_TOKEN = 2**31 - 1


def target_sample_shard(
    logits: Tensor,
    *,
    first_id: int,
    num_ids: int | None = None,
    temperature: float,
    top_p: float,
    seed: int,
    stream: Tensor,
    position: Tensor,
    impl: str = "auto",
) -> SampleShard:
    """List the tokens of one vocabulary shard that may be the draw.

    Args:
        logits: [S, N, Vs] as for `target_sample`.
        first_id: the global id of column 0.
        num_ids: columns that are tokens; the padding behind them is never read. None: all.
        temperature, top_p, seed, stream, position, impl: as for `target_sample`.

    Returns:
        SampleShard: F = 1 if greedy or without top-p, else 64.

    Raises:
        ShapeError, ArgumentError, UnsupportedDevice: as `target_sample`.
    """
    check_sampling(logits, temperature, top_p, seed, stream, position)
    num_ids, first_id = _check_columns(logits, num_ids, first_id)
    capacity = 1 if temperature == 0.0 or top_p == 1.0 else MAX_CANDIDATES
    if not runs_kernel("target_sample_shard", logits, impl):
        return reference.target_sample_shard(
            logits[..., :num_ids], first_id, capacity,
            temperature=temperature, seed=seed, stream=stream, position=position,
        )  # fmt: skip
    return SampleShard(
        *_target_sample_shard(
            logits, num_ids, first_id, capacity, temperature, top_p, as_signed(seed), stream, position
        )
    )


def merge_candidates(shards: Sequence[SampleShard]) -> SampleShard:
    """Keep the candidates of all shards that are candidates of the whole vocabulary.

    Args:
        shards: one of every rank, in any order; their fields may be slices of one gathered tensor.

    Raises:
        ArgumentError: no shard. ShapeError: shards that differ in shape.
    """
    if not shards:
        raise ArgumentError("shards", "at least one", 0)
    sizes = check_shape("shards[0].scores", shards[0].scores, ("S", "N", "F"))
    for i, shard in enumerate(shards):
        for field, tensor in shard._asdict().items():
            check_shape(f"shards[{i}].{field}", tensor, [*sizes.values()][: 2 if field == "top" else 3])
    scores, token_ids, values = (torch.cat(parts, dim=-1) for parts in zip(*(s[:3] for s in shards), strict=True))
    top = torch.stack([shard.top for shard in shards], dim=-1).amax(dim=-1)  # NaN if any is
    # How probable each is, 0 the most: by id, then by value without disturbing that.
    by_id = torch.where(token_ids < 0, _NO_TOKEN, token_ids).argsort(dim=-1, stable=True)
    by_value = by_id.gather(-1, values.gather(-1, by_id).argsort(dim=-1, descending=True, stable=True))
    places = by_value.argsort(dim=-1)
    order = by_id.gather(-1, scores.gather(-1, by_id).argsort(dim=-1, descending=True, stable=True))
    places = places.gather(-1, order)
    best_before = torch.nn.functional.pad(places.cummin(dim=-1).values[..., :-1], (1, 0), value=_NO_TOKEN)
    keeps = (places < best_before) & (token_ids.gather(-1, order) >= 0)
    first = (~keeps).to(torch.uint8).argsort(dim=-1, stable=True)[..., : sizes["F"]]
    keeps, order = keeps.gather(-1, first), order.gather(-1, first)
    return SampleShard(
        torch.where(keeps, scores.gather(-1, order), -torch.inf),
        torch.where(keeps, token_ids.gather(-1, order), -1),
        torch.where(keeps, values.gather(-1, order), -torch.inf),
        top,
    )


def top_p_mass_shard(
    logits: Tensor,
    candidates: SampleShard,
    *,
    first_id: int,
    num_ids: int | None = None,
    temperature: float,
    impl: str = "auto",
) -> Tensor:
    """Add up a shard's mass above each candidate, relative to the most probable token of all shards.

    Args:
        logits, first_id, num_ids, temperature, impl: as for `target_sample_shard`; the temperature above 0.
        candidates: merged over all shards, at most 64 a row.

    Returns:
        [S, N, F + 1] float64, the last entry all mass of the shard; `choose_token` takes the sum over the shards.

    Raises:
        ShapeError, ArgumentError, UnsupportedDevice: as `target_sample`.
    """
    sizes = check_shape("logits", logits, ("S", "N", "Vs"))
    check_shape("candidates.values", candidates.values, (sizes["S"], sizes["N"], "F"))
    check_int("candidates.values.shape[2]", candidates.values.shape[2], minimum=1, maximum=MAX_CANDIDATES)
    check_float("temperature", temperature, above=0.0)
    num_ids, first_id = _check_columns(logits, num_ids, first_id)
    if not runs_kernel("top_p_mass_shard", logits, impl):
        return reference.top_p_mass_shard(
            logits[..., :num_ids], candidates, first_id, temperature=temperature
        )
    _, token_ids, values, top = candidates
    check_shape("candidates.token_ids", token_ids, values.shape)
    check_shape("candidates.top", top, values.shape[:2])
    named = {"token_ids": (token_ids, torch.int32), "values": (values, torch.float32), "top": (top, torch.float32)}
    for name, (tensor, dtype) in named.items():
        if tensor.dtype != dtype or tensor.device != logits.device:
            raise ShapeError(f"candidates.{name}", f"{dtype} on {logits.device}", f"{tensor.dtype} on {tensor.device}")
    return _top_p_mass(logits, num_ids, first_id, values, token_ids, top, temperature)


def choose_token(candidates: SampleShard, mass: Tensor | None = None, *, top_p: float) -> Tensor:
    """Take the draw from the candidates of all shards.

    Args:
        candidates: merged over all shards.
        mass: [S, N, F + 1] float64, summed over the shards; not needed if greedy or without top-p.
        top_p: 0 < top_p <= 1.

    Returns:
        [S, N] int32; -1 where the row held NaN or +inf, or nothing above -inf. (Also where a row has more than F
        candidates and the draw is none of the first F: with F = 64 once in 10^20 rows.)

    Raises:
        ArgumentError: `top_p` below 1 at a temperature (F above 1), and no mass.
    """
    top_p = check_float("top_p", top_p, above=0.0, maximum=1.0)
    if mass is None and top_p < 1.0 and candidates.token_ids.shape[-1] > 1:
        raise ArgumentError("mass", "the shards' mass, which top_p below 1 needs", None)
    tokens = candidates.token_ids[..., 0]
    if mass is not None:
        inside = (mass[..., :-1] < top_p * TOP_P_REACHED * mass[..., -1:]) & (candidates.token_ids >= 0)
        first = inside.to(torch.uint8).argmax(dim=-1, keepdim=True)
        tokens = torch.where(inside.any(dim=-1), candidates.token_ids.gather(-1, first)[..., 0], -1)
    return torch.where(candidates.top.isnan(), -1, tokens).int()


def _check_columns(logits: Tensor, num_ids: int | None, first_id: int) -> tuple[int, int]:
    width = logits.shape[-1]
    num_ids = width if num_ids is None else check_int("num_ids", num_ids, minimum=0, maximum=width)
    return num_ids, check_int("first_id", first_id, minimum=0, maximum=_NO_TOKEN - num_ids)


@cuda_op("target_sample_shard")
def _target_sample_shard(
    logits: Tensor,
    num_ids: int,
    first_id: int,
    capacity: int,
    temperature: float,
    top_p: float,
    seed: int,
    stream: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores, token_ids, values, top = _candidates(logits, capacity)
    if temperature == 0.0:
        launch("target_greedy", logits, num_ids, first_id, token_ids, scores, values, top)
    else:
        noise = noise_arguments(temperature, top_p, seed, stream, position)
        launch("target_draw", logits, num_ids, first_id, *noise, token_ids, scores, values, top, capacity)
    return scores, token_ids, values, top


@_target_sample_shard.register_fake
def _(
    logits: Tensor, num_ids: int, first_id: int, capacity: int, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _candidates(logits, capacity)


def _candidates(logits: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = torch.empty(*logits.shape[:2], capacity, dtype=torch.float64, device=logits.device)
    values = torch.empty_like(scores, dtype=torch.float32)
    top = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    return scores, torch.empty_like(scores, dtype=torch.int32), values, top


@cuda_op("top_p_mass")
def _top_p_mass(
    logits: Tensor, num_ids: int, first_id: int, values: Tensor, token_ids: Tensor, top: Tensor, temperature: float
) -> Tensor:
    capacity = values.shape[2]
    mass = torch.empty(*logits.shape[:2], capacity + 1, dtype=torch.float64, device=logits.device)
    candidates = values.contiguous(), token_ids.contiguous(), top.contiguous()
    launch("top_p_mass", logits, num_ids, first_id, *candidates, capacity, np.float64(temperature), mass)
    return mass


@_top_p_mass.register_fake
def _(logits: Tensor, num_ids: int, first_id: int, values: Tensor, *_: object) -> Tensor:
    return logits.new_empty(*logits.shape[:2], values.shape[2] + 1, dtype=torch.float64)
