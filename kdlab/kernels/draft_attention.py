"""Attention of a drafter's block over its context and itself, with the lengths on the device."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import check_choice, check_int, check_integer_tensor, check_shape
from kdlab.errors import NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import reference
from kdlab.kernels.constants import DTYPE_DEFINE, MMA_DTYPES
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit import PORTABLE, Build, arch_of, kernel, num_sms
from kdlab.kernels.jit.layouts import by_layout
from kdlab.kernels.jit.ops import cuda_op

HEAD_DIMS = (32, 64, 128)
"""Widths of a head that the kernel has: of the tiny pair, of the mini and of the published K2.6 drafter."""
ALL = 2**30
"""A window that no context reaches."""
_TILE_ROWS, _TILE_KEYS, _STAGES, _THREADS, _MERGE_WARPS = 64, 64, 2, 256, 32  # as in the .cu
_BLOCKS_A_SM, _MIN_TILES = 2, 1
_MAX_ROWS, _MAX_PAST = 2**20, 2**30  # the .cu divides in float, and counts in 32 bits within a stream
_ALIGNMENT = 16  # bytes that the kernel copies at once


def build(head_dim: int, dtype: torch.dtype) -> Build:
    """Return what is compiled for heads of `head_dim` values."""
    shared = _shared_bytes(head_dim)
    sizes = (("HEAD_DIM", head_dim), ("PLAN_BYTES", shared), ("MIN_TILES", _MIN_TILES))
    defines = (("DTYPE", DTYPE_DEFINE[dtype]), *sizes)
    return Build("draft_attention.cu", defines, shared_bytes=(("draft_attention", shared),))


def _shared_bytes(head_dim: int) -> int:
    return 2 * head_dim * (_TILE_ROWS + _STAGES * 2 * _TILE_KEYS)  # queries; keys and values of a tile in each stage


BUILDS = tuple(build(head_dim, dtype) for head_dim in HEAD_DIMS for dtype in MMA_DTYPES)


def draft_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    *,
    window: int | None,
    causal: bool,
    past_is_old: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Attend a block's slots to the context before it and to the block itself.

    Args:
        q: [S, b, H, d] float, normed and rotated, as all keys are; any stride between rows, as in k and v.
        k, v: [S, b, G, d] in q's dtype, of the block; query head h reads key head h // (H / G).
        keys, values: [C, P, G, d] in q's dtype, of the context; C is S, or 1 for all streams. Rows from start on are
            never read, they may hold NaN.
        start: [S] i32 (any integer dtype on the CPU), context rows that each stream sees and the absolute position of
            its slot 0; on a GPU cut to 0..P.
        window: a slot sees keys less than this far to either side, itself included; None for all.
        causal: a slot does not see later ones.
        past_is_old: nothing has written keys, values or start since the kernel ahead in the stream began: the kernel
            reads them before that one has ended.
        impl: "auto" is the kernel where `has_kernel` says so, else the reference; "cuda" or "reference" run or raise.

    Returns:
        [S, b, H, d] in q's dtype.

    Raises:
        ShapeError: the arguments do not fit one another. ArgumentError: a bad value (starts are looked at on the CPU
        only). UnsupportedDevice: "cuda" on a device without the kernel. NotSupported: "cuda" for a dtype or a width
        that the kernel does not have.
    """
    if not _runs_kernel(q, k, v, keys, values, start, window, impl):
        return reference.draft_attention(q, k, v, keys, values, start, window=window, causal=causal)
    return _draft_attention(q, k, v, keys, values, start, min(int(window or ALL), ALL), causal, past_is_old)


@by_layout
def _runs_kernel(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: Tensor, window: int | None, impl: str
) -> bool:
    """Check the arguments of `draft_attention`; say whether the kernel runs."""
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    if window is not None:
        check_int("window", window, minimum=1)
    _check(q, k, v, keys, values, start)
    if impl == "auto":
        impl = "cuda" if has_kernel(q.shape[-1], q.dtype, q.device) else "reference"
    if impl == "cuda":
        _check_for_kernel(q, k, v, keys, values, start)
    return impl == "cuda"


def has_kernel(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether the kernel runs heads of `head_dim` values of this dtype on this device."""
    fits = dtype in MMA_DTYPES and head_dim in HEAD_DIMS
    return fits and device.type == "cuda" and arch_of(device) in PORTABLE


def draft_attention_cost(
    starts: Sequence[int],
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    itemsize: int = 2,
) -> Cost:
    """Return the least work of one call: every visible key and value, the queries and the output once.

    Args:
        starts: context rows of each stream.
        block_size: b.
        num_heads, num_kv_heads: H and G.
        head_dim: d.
        window: of the layer; None for all.
        itemsize: bytes of a value.
    """
    rows = block_size * num_heads * head_dim
    seen = [(start if window is None else min(start, window - 1)) + block_size for start in starts]
    moved = sum(2 * num_keys * num_kv_heads * head_dim + 2 * rows for num_keys in seen)
    return Cost(itemsize * moved, sum(4 * num_keys * rows for num_keys in seen))


def _check(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: Tensor) -> None:
    sizes = check_shape("q", q, ["S", "b", "H", "d"])
    if 0 in q.shape or not q.is_floating_point():
        raise ShapeError("q", "floats, and no empty dimension", f"{q.dtype} {list(q.shape)}")
    heads = check_shape("k", k, [sizes["S"], sizes["b"], "G", sizes["d"]])["G"]
    if heads < 1 or sizes["H"] % heads:
        raise ShapeError("k", f"a number of heads that divides {sizes['H']}", list(k.shape))
    check_shape("v", v, list(k.shape))
    contexts = check_shape("keys", keys, ["C", "P", heads, sizes["d"]])
    if contexts["C"] not in (1, sizes["S"]):
        raise ShapeError("keys", f"1 or {sizes['S']} streams", list(keys.shape))
    check_shape("values", values, list(keys.shape))
    check_shape("start", start, [sizes["S"]])
    check_integer_tensor("start", start)
    for name, tensor in (("k", k), ("v", v), ("keys", keys), ("values", values)):
        if tensor.dtype != q.dtype:
            raise ShapeError(name, f"{q.dtype}, as q", tensor.dtype)
    for name, tensor in (("k", k), ("v", v), ("keys", keys), ("values", values), ("start", start)):
        if tensor.device != q.device:
            raise ShapeError(name, f"on {q.device}, as q", tensor.device)
    if start.device.type == "cpu":
        check_int("start", int(start.min()), minimum=0)
        check_int("start", int(start.max()), maximum=contexts["P"])


def _check_for_kernel(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: Tensor) -> None:
    if q.device.type != "cuda":
        raise UnsupportedDevice(f"draft_attention: impl='cuda' needs a CUDA GPU, q is on {q.device}")
    if q.dtype not in MMA_DTYPES:
        raise NotSupported("q", "bfloat16 or float16 for impl='cuda'", q.dtype)
    if q.shape[-1] not in HEAD_DIMS:
        raise NotSupported("q", f"heads of {', '.join(map(str, HEAD_DIMS))} values for impl='cuda'", q.shape[-1])
    rows, past = q.shape[1] * q.shape[2], keys.shape[1] * k.shape[2] * k.shape[3]
    if rows > _MAX_ROWS or past > _MAX_PAST:
        most = f"at most {_MAX_ROWS:,} rows of a block and {_MAX_PAST:,} values a stream for impl='cuda'"
        raise NotSupported("q", most, f"{rows:,} and {past:,}")
    if start.dtype != torch.int32 or not start.is_contiguous():
        raise ShapeError("start", "contiguous int32 on a GPU", f"{start.dtype}, strides {start.stride()}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride()[2:] != (tensor.shape[3], 1) or tensor.stride(0) % 8 or tensor.stride(1) % 8:
            raise ShapeError(name, "heads side by side, rows at multiples of 8", f"strides {tensor.stride()}")
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.stride()[1:] != (tensor.shape[2] * tensor.shape[3], tensor.shape[3], 1) or tensor.stride(0) % 8:
            raise ShapeError(name, "contiguous streams", f"strides {tensor.stride()}")
    if keys.stride() != values.stride():
        raise ShapeError("values", f"strides {keys.stride()}, as keys", values.stride())


@cuda_op("draft_attention")
def _draft_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    window: int,
    causal: bool,
    past_is_old: bool,
) -> Tensor:
    for name, tensor in (("q", q), ("k", k), ("v", v), ("keys", keys), ("values", values)):
        if tensor.data_ptr() % _ALIGNMENT:
            raise ShapeError(name, f"data at a multiple of {_ALIGNMENT} bytes", hex(tensor.data_ptr()))
    num_streams, width, num_heads, head_dim = q.shape
    kv_heads, capacity = k.shape[2], keys.shape[1]
    group = num_heads // kv_heads
    tiles = -(-width * group // _TILE_ROWS)
    units = num_streams * kv_heads * tiles
    splits = _num_splits(units, min(capacity, window) + width, num_sms(q.device))
    o = q.new_empty(q.shape)
    o_partial = stats = None
    if splits > 1:
        o_partial = torch.empty(units, splits, _TILE_ROWS, head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(units, splits, _TILE_ROWS, 2, dtype=torch.float32, device=q.device)
    streams = (q.stride(0), k.stride(0), v.stride(0), 0 if len(keys) == 1 else keys.stride(0))
    rows = (q.stride(1), k.stride(1), v.stride(1))
    sizes = (width, num_heads, kv_heads, group, tiles, capacity, window)
    reciprocals = (1 / group, 1 / tiles, 1 / splits)
    program = build(head_dim, q.dtype)
    kernel(program, "draft_attention", q.device).launch(
        (splits, kv_heads * tiles, num_streams),
        _THREADS,
        *(q, k, v, keys, values, start, o, o_partial, stats),
        *map(np.int64, streams),
        *(*rows, *sizes, int(causal), splits, *reciprocals, math.log2(math.e) * head_dim**-0.5),
        int(past_is_old),
        shared_bytes=_shared_bytes(head_dim),
        overlap=True,
    )
    if splits > 1:
        row_warps = _merge_warps(units * _TILE_ROWS, splits, num_sms(q.device))
        grid = (_TILE_ROWS * row_warps // _MERGE_WARPS, kv_heads * tiles, num_streams)
        merge = kernel(program, "draft_merge", q.device)
        parts = (o_partial, stats, start, o)
        merge.launch(grid, 32 * _MERGE_WARPS, *parts, *sizes, splits, *reciprocals, row_warps, overlap=True)
    return o


def _num_splits(units: int, num_keys: int, multiprocessors: int) -> int:
    """Return how many parts the keys of a unit are cut into: enough for all multiprocessors, a tile a part at least."""
    return max(1, min(_BLOCKS_A_SM * multiprocessors // units, -(-num_keys // (_MIN_TILES * _TILE_KEYS))))


def _merge_warps(num_rows: int, splits: int, multiprocessors: int) -> int:
    """Return how many warps add up a row, a power of two: a part each at most, and no more than run at once."""
    most = min(_MERGE_WARPS, splits, max(1, _MERGE_WARPS * multiprocessors // num_rows))
    return 1 << (most.bit_length() - 1)


@_draft_attention.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)
