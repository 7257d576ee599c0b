"""A drafter's queries and keys between projection and attention: normed and rotated, and appended to the context."""

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import check_choice, check_float_tensor, check_int, check_integer_tensor, check_shape
from kdlab.errors import NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import reference
from kdlab.kernels.constants import DTYPE_DEFINE
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit import PORTABLE, Build, arch_of, kernel
from kdlab.kernels.jit.ops import cuda_op

_WARPS = 4  # as in the .cu


def build(head_dim: int, dtype: torch.dtype) -> Build:
    """Return what is compiled for heads of `head_dim` values."""
    return Build("head_norm_rope.cu", (("HEAD_DIM", head_dim), ("DTYPE", DTYPE_DEFINE[dtype])))


BUILDS = tuple(build(head_dim, dtype) for head_dim in (32, 64, 128) for dtype in DTYPE_DEFINE)


def head_norm_rope(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    *,
    num_queries: int,
    eps: float,
    impl: str = "auto",
) -> Tensor:
    """Norm each head of a block's queries and keys and rotate it by its slot's absolute position.

    The kernel may read the weights before the one ahead in the stream has ended: nothing may have written them just
    before. The same holds for `append_context`.

    Args:
        x: [S, n, H, d] float, queries in the first heads, keys in the others; any strides between rows.
        q_weight, k_weight: [d] in x's dtype, of the norms.
        cos: [M, d/2] f32 by absolute position; sin alike.
        sin: [M, d/2] f32.
        start: [S] i32 (any integer dtype in the reference), position of row 0 of each stream; positions outside the
            tables take the nearest, as a stream at rest may have them.
        num_queries: heads that are queries, 0 to H.
        eps: of the norms.
        impl: "auto" is the kernel for CUDA tensors but float64, else the reference; "cuda" or "reference" run or raise.

    Returns:
        [S, n, H, d] in x's dtype.

    Raises:
        ShapeError: the arguments do not fit one another. ArgumentError: a bad value. UnsupportedDevice: "cuda" on a
        device without the kernel. NotSupported: "cuda" for float64.
    """
    sizes = check_shape("x", x, ["S", "n", "H", "d"])
    num_queries = check_int("num_queries", num_queries, minimum=0, maximum=sizes["H"])
    weights, tables, counts = {"q_weight": q_weight, "k_weight": k_weight}, {"cos": cos, "sin": sin}, {"start": start}
    _check("x", x, weights, tables, counts)
    if not _use_kernel(impl, x, {}, weights, tables, counts):
        arguments = (x, q_weight, k_weight, cos, sin, start)
        return reference.head_norm_rope(*arguments, num_queries=num_queries, eps=eps)
    return _head_norm_rope(x, q_weight, k_weight, cos, sin, start, num_queries, eps)


def append_context(
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    count: Tensor,
    *,
    eps: float,
    impl: str = "auto",
) -> None:
    """Write normed, rotated keys and the values of committed rows into the context of all layers.

    Args:
        k, v: [layers, S, n, G, d] float, not yet normed; any strides between rows.
        weight: [layers, d] in k's dtype, of the keys' norms.
        cos: [M, d/2] f32 by absolute position; sin alike.
        sin: [M, d/2] f32.
        keys, values: [layers, S, P, G, d] in k's dtype; row i of a stream goes to its row start + i. The last one is a
            bin: rows from count on, and rows without a place, are not written by the kernel, and go there in the
            reference.
        start, count: [S] i32 (any integer dtype in the reference): where the rows go, and how many are real.
        eps: of the norm.
        impl: as in `head_norm_rope`.

    Raises:
        As `head_norm_rope`.
    """
    sizes = check_shape("k", k, ["layers", "S", "n", "G", "d"])
    check_shape("v", v, list(k.shape))
    contexts = {"keys": keys, "values": values}
    for name, tensor in contexts.items():
        if check_shape(name, tensor, [*k.shape[:2], "P", sizes["G"], sizes["d"]])["P"] < 1:
            raise ShapeError(name, "at least one row", list(tensor.shape))
    check_shape("values", values, list(keys.shape))
    weights, tables, counts = {"weight": weight, "v": v} | contexts, {"cos": cos, "sin": sin}, {"start": start}
    counts["count"] = count
    _check("k", k, weights, tables, counts)
    arguments = (k, v, weight, cos, sin, keys, values, start, count)
    if _use_kernel(impl, k, contexts | {"v": v}, {"weight": weight}, tables, counts):
        _append_context(*arguments, eps)
    else:
        reference.append_context(*arguments, eps=eps)


def head_norm_rope_cost(num_rows: int, num_heads: int, head_dim: int, itemsize: int = 2) -> Cost:
    """Return the cost of `num_rows` rows, in and out once, and their angles; `append_context` has 2 G heads a row."""
    return Cost(num_rows * (2 * num_heads * head_dim * itemsize + 4 * head_dim))


def _check(
    rows: str, x: Tensor, floats: dict[str, Tensor], tables: dict[str, Tensor], counts: dict[str, Tensor]
) -> None:
    head_dim = x.shape[-1]
    if 0 in x.shape[-2:] or head_dim % 2 or not x.is_floating_point():
        raise ShapeError(rows, "heads of floats, an even number each", f"{x.dtype} {list(x.shape)}")
    for name, tensor in floats.items():
        if name.endswith("weight"):
            check_shape(name, tensor, [*x.shape[:-4], head_dim])
        if tensor.dtype != x.dtype:
            raise ShapeError(name, f"{x.dtype}, as the rows", tensor.dtype)
    for name, tensor in tables.items():
        if check_shape(name, tensor, ["M", head_dim // 2])["M"] < 1 or tensor.shape != tables["cos"].shape:
            raise ShapeError(name, f"[positions, {head_dim // 2}]", list(tensor.shape))
        check_float_tensor(name, tensor)
    for name, tensor in counts.items():
        check_shape(name, tensor, [x.shape[-4]])
        check_integer_tensor(name, tensor)
    for name, tensor in (floats | tables | counts).items():
        if tensor.device != x.device:
            raise ShapeError(name, f"on {x.device}", tensor.device)


def _use_kernel(
    impl: str,
    x: Tensor,
    others: dict[str, Tensor],
    weights: dict[str, Tensor],
    tables: dict[str, Tensor],
    counts: dict[str, Tensor],
) -> bool:
    """Say whether the kernel runs; raise where it was asked for, or is due, and cannot."""
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    fits = x.is_cuda and x.dtype in DTYPE_DEFINE
    if impl == "reference" or (impl == "auto" and not (fits and arch_of(x.device) in PORTABLE)):
        return False
    if not x.is_cuda:
        raise UnsupportedDevice(f"head_norm_rope: impl='cuda' needs a CUDA GPU, the rows are on {x.device}")
    if not fits:
        raise NotSupported("x", "float32, bfloat16 or float16 for impl='cuda'", x.dtype)
    for name, tensor in ({"x": x} | others).items():
        heads, width = tensor.shape[-2:]
        if tensor.stride()[-2:] != (width, 1):
            raise ShapeError(name, "heads side by side", f"strides {tensor.stride()}")
        in_context = name in ("keys", "values")
        if in_context and tensor.stride()[:-2] != (*others["keys"].stride()[:-3], heads * width):
            raise ShapeError(name, "contiguous streams, alike in keys and values", f"strides {tensor.stride()}")
    wanted = dict.fromkeys(weights, x.dtype) | dict.fromkeys(tables, torch.float32) | dict.fromkeys(counts, torch.int32)
    for name, tensor in (weights | tables | counts).items():
        if tensor.dtype != wanted[name] or not tensor.is_contiguous():
            raise ShapeError(name, f"contiguous {wanted[name]}", f"{tensor.dtype}, strides {tensor.stride()}")
    return True


@cuda_op("head_norm_rope")
def _head_norm_rope(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    num_queries: int,
    eps: float,
) -> Tensor:
    num_streams, num_rows, num_heads, head_dim = x.shape
    y = x.new_empty(x.shape)
    if y.numel() == 0:
        return y
    kernel(build(head_dim, x.dtype), "head_norm_rope", x.device).launch(
        (-(-num_heads // _WARPS), num_rows, num_streams),
        32 * _WARPS,
        *(x, q_weight, k_weight, cos, sin, start, y, np.int64(x.stride(0)), np.int64(x.stride(1))),
        *(num_heads, num_queries, cos.shape[0], float(eps)),
        overlap=True,
    )
    return y


@_head_norm_rope.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@cuda_op("append_context", mutates_args=("keys", "values"))
def _append_context(
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    count: Tensor,
    eps: float,
) -> None:
    num_layers, num_streams, num_rows, num_heads, head_dim = k.shape
    if 0 in (num_layers, num_streams, num_rows):
        return
    strides = (*k.stride()[:3], *v.stride()[:3], *keys.stride()[:2])
    kernel(build(head_dim, k.dtype), "append_context", k.device).launch(
        (-(-2 * num_heads // _WARPS), num_rows, num_layers * num_streams),
        32 * _WARPS,
        *(k, v, weight, cos, sin, start, count, keys, values),
        *map(np.int64, strides),
        *(num_streams, num_heads, keys.shape[2], cos.shape[0], float(eps)),
        overlap=True,
    )


@_append_context.register_fake
def _(*_: object) -> None:
    """Everything is written in place: there is nothing to describe."""
