"""draft_topk: the best K tokens of every draft row, with their log-probabilities; whole vocabulary or shards."""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import check_int, check_shape
from kdlab.errors import ArgumentError
from kdlab.kernels import jit, reference
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.logits import DTYPES, THREADS, cluster_size, constants, count_chunks, runs_kernel
from kdlab.kernels.reference import TopK, TopKShard

__all__ = ["TopK", "TopKShard", "draft_topk", "draft_topk_cost", "draft_topk_shard", "merge_topk"]

MAX_K, _ROOM = 256, 2  # as in the .cu
_WARP = 32
_NO_TOKEN = 2**31 - 1
_DYNAMIC_BYTES = 97_000  # of a block: with the static part within the 101,376 bytes of sm_89 and sm_120


def _shared_bytes(k: int, cluster: int, num_chunks: int, item_bytes: int) -> int:
    """`Plan` in the .cu: lists, sums, candidates and items, and the largest logit of every thread and chunk."""
    words = _ROOM * k * cluster + num_chunks * (THREADS // _WARP) + k * (1 + 16 // item_bytes)
    return 8 * words + 4 * _ROOM * k + -(-num_chunks // cluster) * THREADS * item_bytes


def _groups_per_warp(k: int, cluster: int) -> int:
    """Return the power of two that cuts a row's threads into 2 K groups or a few more: 512 at most, K at least."""
    most = 1 << (_WARP // cluster).bit_length() - 1
    wanted = -(-2 * k // (cluster * THREADS // _WARP))
    return min(1 << (wanted - 1).bit_length(), most)


def _build(dtype: torch.dtype) -> jit.Build:
    return jit.Build("draft_topk.cu", constants(dtype), shared_bytes=(("draft_topk", _DYNAMIC_BYTES),))


BUILDS = tuple(map(_build, DTYPES))


def draft_topk(logits: Tensor, k: int, *, impl: str = "auto") -> TopK:
    """Best K tokens of every draft row with their log-probabilities; exact ties go to the smaller id.

    A row gets the same bits whatever else is in the batch, and whatever K.

    Args:
        logits: [S, L, V] any float dtype; on a GPU float32, bfloat16 or float16, the values of a row side by side.
        k: 1 <= K <= V, on a GPU at most 256.
        impl: "auto" (the kernel for CUDA tensors), "cuda" or "reference".

    Returns:
        TopK; a row that holds NaN or +inf, or -inf alone, is flagged: its log-probabilities are NaN, its ids 0..K-1.

    Raises:
        ShapeError: logits of another shape, dtype or layout. ArgumentError: K is out of range, an unknown impl.
        UnsupportedDevice: "cuda" for tensors on another device.
    """
    sizes = check_shape("logits", logits, ("S", "L", "V"))
    k = check_int("k", k, minimum=1, maximum=sizes["V"])
    if not runs_kernel("draft_topk", logits, impl):
        return reference.draft_topk(logits, k)
    check_int("k", k, maximum=MAX_K)
    values, token_ids, nonfinite, _ = _draft_topk(logits, k, 0, sizes["V"], False)
    return TopK(values, token_ids, nonfinite)


def draft_topk_shard(
    logits: Tensor, k: int, *, first_id: int, num_ids: int | None = None, impl: str = "auto"
) -> TopKShard:
    """Best K tokens of one vocabulary shard; `merge_topk` puts the shards' together.

    Args:
        logits: [S, L, Vs] as for `draft_topk`.
        k: at least 1, on a GPU at most 256; it may be larger than the shard.
        first_id: the global id of column 0.
        num_ids: columns that are tokens; the padding behind them is never read. None: all.
        impl: as for `draft_topk`.

    Raises:
        ShapeError, ArgumentError, UnsupportedDevice: as `draft_topk`.
    """
    width = check_shape("logits", logits, ("S", "L", "Vs"))["Vs"]
    k = check_int("k", k, minimum=1)
    num_ids = width if num_ids is None else check_int("num_ids", num_ids, minimum=0, maximum=width)
    first_id = check_int("first_id", first_id, minimum=0, maximum=_NO_TOKEN - num_ids)
    if not runs_kernel("draft_topk_shard", logits, impl):
        return reference.draft_topk_shard(logits[..., :num_ids], k, first_id)
    check_int("k", k, maximum=MAX_K)
    values, token_ids, nonfinite, lse = _draft_topk(logits, k, first_id, num_ids, True)
    return TopKShard(values, token_ids, lse, nonfinite)


def merge_topk(shards: Sequence[TopKShard]) -> TopK:
    """Put the best tokens of all vocabulary shards together: the TopK of the whole vocabulary.

    Args:
        shards: one of every rank, in any order, which together hold K tokens at least; their fields may be slices of
            one gathered tensor.

    Returns:
        TopK: log_probs [S, L, K] f32, token_ids [S, L, K] i32, nonfinite [S, L] bool.

    Raises:
        ArgumentError: no shard. ShapeError: shards that differ in shape.
    """
    if not shards:
        raise ArgumentError("shards", "at least one", 0)
    sizes = check_shape("shards[0].values", shards[0].values, ("S", "L", "K"))
    for i, shard in enumerate(shards):
        for field in ("values", "token_ids"):
            check_shape(f"shards[{i}].{field}", getattr(shard, field), [*sizes.values()])
        for field in ("lse", "nonfinite"):
            check_shape(f"shards[{i}].{field}", getattr(shard, field), [sizes["S"], sizes["L"]])
    values, token_ids = (torch.cat(parts, dim=-1) for parts in zip(*(s[:2] for s in shards), strict=True))
    lse = torch.stack([shard.lse for shard in shards], dim=-1).logsumexp(dim=-1)
    nonfinite = torch.stack([shard.nonfinite for shard in shards], dim=-1).any(dim=-1) | ~lse.isfinite()
    # By id, then by value without disturbing that: ties go to the smaller id, places that hold no token come last.
    token_ids, order = torch.where(token_ids < 0, _NO_TOKEN, token_ids).sort(dim=-1, stable=True)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    k = sizes["K"]
    bad, places = nonfinite[..., None], torch.arange(k, dtype=torch.int32, device=token_ids.device)
    log_probs = torch.where(bad, torch.nan, values[..., :k].double() - lse[..., None]).float()
    return TopK(log_probs, torch.where(bad, places, token_ids.gather(-1, order)[..., :k]), nonfinite)


def draft_topk_cost(streams: int, rows: int, vocab: int, k: int, *, dtype: torch.dtype) -> Cost:
    """Return the cost of `streams` times `rows` rows: every logit read once, K pairs and a flag written."""
    return Cost(streams * rows * (vocab * dtype.itemsize + 8 * k + 1))


@cuda_op("draft_topk")
def _draft_topk(
    logits: Tensor, k: int, first_id: int, num_ids: int, shard: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, token_ids, nonfinite, lse = _outputs(logits, k, shard)
    num_rows = nonfinite.numel()
    if num_rows == 0:
        return values, token_ids, nonfinite, lse
    kernel = jit.kernel(_build(logits.dtype), "draft_topk", logits.device)
    chunks = count_chunks(num_ids, logits.element_size())
    shared_bytes = functools.partial(_shared_bytes, k, num_chunks=chunks, item_bytes=logits.element_size())
    # One block alone would find more candidates than it has room for.
    cluster = cluster_size(kernel, num_rows, chunks, shared_bytes, least=2)
    strides = np.int64(logits.stride(0)), np.int64(logits.stride(1))
    sizes = (logits.shape[1], num_ids, first_id, k, cluster, _groups_per_warp(k, cluster))
    kernel.launch(
        num_rows * cluster, THREADS, logits, *strides, *sizes, values, token_ids, nonfinite, lse if shard else None,
        shared_bytes=shared_bytes(cluster),
        cluster=cluster if cluster > 1 else None,
        overlap=True,
    )  # fmt: skip
    return values, token_ids, nonfinite, lse


@_draft_topk.register_fake
def _(logits: Tensor, k: int, first_id: int, num_ids: int, shard: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(logits, k, shard)


def _outputs(logits: Tensor, k: int, shard: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams, rows, _ = logits.shape
    values = torch.empty(streams, rows, k, dtype=torch.float32, device=logits.device)
    lse = torch.empty(streams if shard else 0, rows, dtype=torch.float64, device=logits.device)
    nonfinite = torch.empty(streams, rows, dtype=torch.bool, device=logits.device)
    return values, torch.empty_like(values, dtype=torch.int32), nonfinite, lse
