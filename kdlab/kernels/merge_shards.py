"""merge_shards: what every rank does with what all ranks gathered of their vocabulary shards, a launch a step.

`draft_topk.merge_topk` and `sample_shards.merge_candidates` and `choose_token` are the same in plain torch.
"""

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import check_float, check_int, check_shape
from kdlab.errors import ArgumentError, ShapeError
from kdlab.kernels import draft_topk, jit, sample_shards
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.logits import runs_kernel
from kdlab.kernels.reference import TOP_P_REACHED, SampleShard, TopK, TopKShard
from kdlab.kernels.target_sample import MAX_CANDIDATES

MAX_RANKS = 32  # a lane each
_THREADS = 256
_ENTRY_BYTES = {"merge_topk": 8, "merge_candidates": 20}  # of shared memory
BUILD = jit.Build(
    "merge_shards.cu",
    (("DTYPE", 0), ("BLOCK_THREADS", _THREADS), ("CHUNK_BYTES", 16 * _THREADS)),
    shared_bytes=(
        ("merge_topk", MAX_RANKS * draft_topk.MAX_K * _ENTRY_BYTES["merge_topk"]),
        ("merge_candidates", MAX_RANKS * (MAX_CANDIDATES * _ENTRY_BYTES["merge_candidates"] + 4)),
    ),
)
BUILDS = (BUILD,)


def merge_topk(shards: TopKShard, *, impl: str = "auto") -> TopK:
    """Put the best tokens of all vocabulary shards together; see `draft_topk.merge_topk`.

    Args:
        shards: of every rank, each field stacked: values [R, S, L, K] f32, token_ids [R, S, L, K] i32, lse [R, S, L]
            f64, nonfinite [R, S, L] bool. Ranks may stand at any stride, the rest of a field is contiguous.
        impl: "auto" (the kernel for CUDA tensors), "cuda" or "reference".

    Returns:
        TopK: log_probs [S, L, K] f32, token_ids [S, L, K] i32, nonfinite [S, L] bool.

    Raises:
        ShapeError: the fields do not fit one another. ArgumentError: more ranks or candidates than a block holds, an
            unknown impl. UnsupportedDevice: "cuda" for tensors on another device.
    """
    sizes = check_shape("shards.values", shards.values, ["R", "S", "L", "K"])
    if not runs_kernel("merge_topk", shards.values, impl):
        return draft_topk.merge_topk([TopKShard(*fields) for fields in zip(*shards, strict=True)])
    row = [sizes["R"], sizes["S"], sizes["L"]]
    _check_room(sizes["R"], sizes["K"], draft_topk.MAX_K)
    _check("shards.values", shards.values, [*row, sizes["K"]], torch.float32)
    _check("shards.token_ids", shards.token_ids, [*row, sizes["K"]], torch.int32)
    _check("shards.lse", shards.lse, row, torch.float64)
    _check("shards.nonfinite", shards.nonfinite, row, torch.bool)
    return TopK(*_merge_topk(*shards))


def merge_candidates(shards: SampleShard, *, impl: str = "auto") -> SampleShard:
    """Keep the candidates of all shards that are candidates of the whole vocabulary; see `sample_shards`.

    Args:
        shards: of every rank, each field stacked as for `merge_topk`: scores [R, S, N, F] f64, token_ids i32 and values
            f32 alike, top [R, S, N] f32.
        impl: as for `merge_topk`.

    Raises:
        ShapeError, ArgumentError, UnsupportedDevice: as `merge_topk`.
    """
    sizes = check_shape("shards.scores", shards.scores, ["R", "S", "N", "F"])
    if not runs_kernel("merge_candidates", shards.values, impl):
        return sample_shards.merge_candidates([SampleShard(*fields) for fields in zip(*shards, strict=True)])
    row = [sizes["R"], sizes["S"], sizes["N"]]
    _check_room(sizes["R"], sizes["F"], MAX_CANDIDATES)
    _check("shards.scores", shards.scores, [*row, sizes["F"]], torch.float64)
    _check("shards.token_ids", shards.token_ids, [*row, sizes["F"]], torch.int32)
    _check("shards.values", shards.values, [*row, sizes["F"]], torch.float32)
    _check("shards.top", shards.top, row, torch.float32)
    return SampleShard(*_merge_candidates(*shards))


def best_candidate(shards: SampleShard, *, impl: str = "auto") -> Tensor:
    """Take the draw from shards of one candidate each, [S, N] i32: `merge_candidates`, then `choose_token`.

    Args:
        shards: of every rank, as for `merge_candidates`, with F = 1: greedy, or drawn without top-p.
        impl: as for `merge_topk`.

    Raises:
        ShapeError, ArgumentError, UnsupportedDevice: as `merge_topk`.
    """
    sizes = check_shape("shards.scores", shards.scores, ["R", "S", "N", 1])
    if not runs_kernel("best_candidate", shards.values, impl):
        return choose_token(merge_candidates(shards, impl=impl), top_p=1.0, impl=impl)
    row = [sizes["R"], sizes["S"], sizes["N"]]
    _check_room(sizes["R"], 1, 1)
    _check("shards.scores", shards.scores, [*row, 1], torch.float64)
    _check("shards.token_ids", shards.token_ids, [*row, 1], torch.int32)
    _check("shards.top", shards.top, row, torch.float32)
    return _best_candidate(shards.scores, shards.token_ids, shards.top)


def choose_token(candidates: SampleShard, mass: Tensor | None = None, *, top_p: float, impl: str = "auto") -> Tensor:
    """Take the draw from the candidates of all shards, [S, N] i32; see `sample_shards.choose_token`."""
    if not runs_kernel("choose_token", candidates.values, impl):
        return sample_shards.choose_token(candidates, mass, top_p=top_p)
    sizes = check_shape("candidates.token_ids", candidates.token_ids, ["S", "N", "F"])
    top_p = check_float("top_p", top_p, above=0.0, maximum=1.0)
    _check("candidates.token_ids", candidates.token_ids, [*sizes.values()], torch.int32)
    _check("candidates.top", candidates.top, [sizes["S"], sizes["N"]], torch.float32)
    if mass is not None:
        _check("mass", mass, [sizes["S"], sizes["N"], sizes["F"] + 1], torch.float64)
    elif top_p < 1.0 and sizes["F"] > 1:
        raise ArgumentError("mass", "the shards' mass, which top_p below 1 needs", None)
    return _choose_token(candidates.token_ids.contiguous(), candidates.top.contiguous(), mass, top_p)


def _check_room(num_ranks: int, candidates: int, most: int) -> None:
    check_int("ranks", num_ranks, minimum=1, maximum=MAX_RANKS)
    check_int("candidates of a shard", candidates, minimum=1, maximum=most)


def _check(name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype) -> None:
    check_shape(name, tensor, shape)
    if tensor.dtype != dtype or not tensor.is_cuda:
        raise ShapeError(name, f"{dtype} on a GPU", f"{tensor.dtype} on {tensor.device}")


def _rank_strides(fields: tuple[Tensor, ...]) -> list[object]:
    """Return each field, ranks apart but otherwise contiguous, and what lies between two ranks."""
    ready = [field if field[0].is_contiguous() else field.contiguous() for field in fields]
    return [argument for field in ready for argument in (field, np.int64(field.stride(0)))]


@cuda_op("merge_topk")
def _merge_topk(values: Tensor, token_ids: Tensor, lse: Tensor, nonfinite: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ranks, k = values.shape[0], values.shape[-1]
    outputs = _topk_outputs(values)
    if outputs[2].numel():
        jit.kernel(BUILD, "merge_topk", values.device).launch(
            outputs[2].numel(), _THREADS, *_rank_strides((values, token_ids, lse, nonfinite)), ranks, k, *outputs,
            shared_bytes=ranks * k * _ENTRY_BYTES["merge_topk"], overlap=True,
        )  # fmt: skip
    return outputs


@_merge_topk.register_fake
def _(values: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return _topk_outputs(values)


def _topk_outputs(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_probs = values.new_empty(values.shape[1:])
    ids = torch.empty_like(log_probs, dtype=torch.int32)
    return log_probs, ids, torch.empty(log_probs.shape[:2], dtype=torch.bool, device=values.device)


@cuda_op("merge_candidates")
def _merge_candidates(
    scores: Tensor, token_ids: Tensor, values: Tensor, top: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ranks, capacity = scores.shape[0], scores.shape[-1]
    outputs = _candidate_outputs(scores)
    if outputs[3].numel():
        jit.kernel(BUILD, "merge_candidates", scores.device).launch(
            outputs[3].numel(), _THREADS, *_rank_strides((scores, token_ids, values, top)), ranks, capacity, *outputs,
            shared_bytes=ranks * capacity * _ENTRY_BYTES["merge_candidates"] + 4 * ranks, overlap=True,
        )  # fmt: skip
    return outputs


@_merge_candidates.register_fake
def _(scores: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _candidate_outputs(scores)


def _candidate_outputs(scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = scores.new_empty(scores.shape[1:])
    ids, values = torch.empty_like(out, dtype=torch.int32), torch.empty_like(out, dtype=torch.float32)
    return out, ids, values, values.new_empty(out.shape[:2])


@cuda_op("best_candidate")
def _best_candidate(scores: Tensor, token_ids: Tensor, top: Tensor) -> Tensor:
    tokens = token_ids.new_empty(top.shape[1:])
    if tokens.numel():
        jit.kernel(BUILD, "best_candidate", top.device).launch(
            -(-tokens.numel() * 32 // _THREADS), _THREADS, *_rank_strides((scores, token_ids, top)), top.shape[0],
            tokens.numel(), tokens, overlap=True,
        )  # fmt: skip
    return tokens


@_best_candidate.register_fake
def _(_scores: Tensor, token_ids: Tensor, top: Tensor) -> Tensor:
    return token_ids.new_empty(top.shape[1:])


@cuda_op("choose_token")
def _choose_token(token_ids: Tensor, top: Tensor, mass: Tensor | None, top_p: float) -> Tensor:
    tokens = token_ids.new_empty(top.shape)
    if tokens.numel():
        sizes = (tokens.numel(), token_ids.shape[-1], np.float64(top_p * TOP_P_REACHED))
        mass = None if mass is None else mass.contiguous()
        jit.kernel(BUILD, "choose_token", top.device).launch(
            -(-tokens.numel() // _THREADS), _THREADS, token_ids, top, mass, *sizes, tokens, overlap=True
        )
    return tokens


@_choose_token.register_fake
def _(token_ids: Tensor, top: Tensor, *_: object) -> Tensor:
    return token_ids.new_empty(top.shape)
