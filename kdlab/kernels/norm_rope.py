"""norm_rope: norm the latents, rotate keys and queries, and write the cache rows of one layer, in one launch."""

import functools

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import check_choice, check_float_tensor, check_integer_tensor, check_shape
from kdlab.errors import ShapeError, UnsupportedDevice
from kdlab.kernels import jit, reference
from kdlab.kernels.constants import DTYPE_DEFINE, PAGE_SIZE
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit.layouts import by_layout
from kdlab.kernels.jit.ops import cuda_op

DTYPES = tuple(DTYPE_DEFINE)  # that the kernel takes
_HEADS_A_BLOCK, _THREADS = 8, 128  # as in the .cu


@functools.lru_cache(maxsize=16)
def build(latent_dim: int, rope_dim: int, dtype: torch.dtype) -> jit.Build:
    """Return what is compiled for latents of `latent_dim` values and rotated parts of `rope_dim`."""
    return jit.Build("norm_rope.cu", (("LATENT", latent_dim), ("ROPE", rope_dim), ("DTYPE", DTYPE_DEFINE[dtype])))


BUILDS = tuple(build(512, 64, dtype) for dtype in DTYPES)


def norm_rope(
    kv: Tensor,
    q_rope: Tensor,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    num_nodes: Tensor,
    q: Tensor,
    *,
    eps: float,
    interleaved: bool,
    inputs_are_old: bool = False,
    impl: str = "auto",
) -> None:
    """Write each used row's normed latent and rotated key into the cache, and its rotated queries into q[..., C:].

    Rows from num_nodes on stay untouched, in the cache and in q. On a GPU a row that the block table or `pages` does
    not hold is not written; the reference raises on the CPU.

    Args:
        kv: [S, N, C + R] float32, bfloat16 or float16, the raw output of kv_a; any strides between rows.
        q_rope: [S, N, H, R] of the same dtype, not yet rotated; any strides between heads.
        norm_weight: [C] of the same dtype.
        cos: [S, N, R/2] f32 of each row's position; sin alike.
        sin: [S, N, R/2] f32.
        pages: [P, 64, C + R] of the same dtype, one layer; row i of a stream goes to its row prefix_len + i.
        block_table: [S, M] i32, pages of each stream.
        prefix_len: [S] i32.
        num_nodes: [S] i32, rows in use; 0 for a stream that rests.
        q: [S, N, H, C + R] of the same dtype.
        eps: of the norm.
        interleaved: layout of the pairs, see `kdlab.kernels.rope.apply_rope`.
        inputs_are_old: the kernel ahead in the stream writes none of these tensors but parts of q that this one leaves
            alone, and either waits before it lets this one start or lets none start early: this one runs beside it.
        impl: "auto", "cuda" or "reference".

    Raises:
        ShapeError: the arguments do not fit one another. ArgumentError: an unknown impl, a row outside the block table
            (CPU only). UnsupportedDevice: "cuda" for tensors on another device.
    """
    arguments = (kv, q_rope, norm_weight, cos, sin, pages, block_table, prefix_len, num_nodes, q)
    if _runs_kernel(*arguments, impl):
        return _norm_rope(*arguments, eps, interleaved, inputs_are_old)
    return reference.norm_rope(*arguments, eps=eps, interleaved=interleaved)


@by_layout
def _runs_kernel(
    kv: Tensor,
    q_rope: Tensor,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    num_nodes: Tensor,
    q: Tensor,
    impl: str,
) -> bool:
    """Check the arguments of `norm_rope`; say whether the kernel runs."""
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    if impl == "cuda" and not kv.is_cuda:
        raise UnsupportedDevice(f"norm_rope: impl 'cuda' needs CUDA tensors, kv is on {kv.device}")
    floats = {"q_rope": q_rope, "norm_weight": norm_weight, "pages": pages, "q": q}
    others = {"cos": cos, "sin": sin, "block_table": block_table, "prefix_len": prefix_len, "num_nodes": num_nodes}
    _check_shapes(kv, **floats, **others)
    for name, tensor in (floats | others).items():
        if tensor.device != kv.device:
            raise ShapeError(name, f"on {kv.device}", tensor.device)
    for name, tensor in {"kv": kv, "cos": cos, "sin": sin}.items():
        check_float_tensor(name, tensor)
    for name in ("block_table", "prefix_len", "num_nodes"):
        check_integer_tensor(name, others[name])
    for name, tensor in floats.items():
        if tensor.dtype != kv.dtype:
            raise ShapeError(name, f"{kv.dtype}, as kv", tensor.dtype)
    if impl == "reference" or not kv.is_cuda:
        return False
    _check_for_kernel(kv, q_rope, floats, others)
    return True


def norm_rope_cost(num_rows: int, num_heads: int, latent_dim: int, rope_dim: int, itemsize: int = 2) -> Cost:
    """Return the cost of `num_rows` used rows: kv and the cache row, rotated queries in and out, the f32 tables."""
    values = 2 * (latent_dim + rope_dim) + 2 * num_heads * rope_dim
    return Cost(num_rows * (values * itemsize + 4 * rope_dim) + latent_dim * itemsize)


def _check_shapes(
    kv: Tensor,
    q_rope: Tensor,
    norm_weight: Tensor,
    pages: Tensor,
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    num_nodes: Tensor,
) -> None:
    sizes = check_shape("kv", kv, ["S", "N", "C+R"])
    streams, rows, width = sizes["S"], sizes["N"], sizes["C+R"]
    heads = check_shape("q_rope", q_rope, [streams, rows, "H", "R"])
    check_shape("norm_weight", norm_weight, [width - heads["R"]])
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(name, table, [streams, rows, heads["R"] // 2])
    if heads["R"] % 2 or heads["R"] < 1 or heads["R"] >= width:
        raise ShapeError("q_rope", f"an even last axis below {width}", list(q_rope.shape))
    check_shape("pages", pages, ["P", PAGE_SIZE, width])
    check_shape("block_table", block_table, [streams, "M"])
    for name, count in (("prefix_len", prefix_len), ("num_nodes", num_nodes)):
        check_shape(name, count, [streams])
    check_shape("q", q, [streams, rows, heads["H"], width])


def _check_for_kernel(kv: Tensor, q_rope: Tensor, floats: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    if kv.dtype not in DTYPES:
        raise ShapeError("kv", "float32, bfloat16 or float16 for the CUDA kernel", kv.dtype)
    for name, tensor in others.items():
        wanted = torch.float32 if name in ("cos", "sin") else torch.int32
        if tensor.dtype != wanted or not tensor.is_contiguous():
            raise ShapeError(name, f"contiguous {wanted}", f"{tensor.dtype}, strides {tensor.stride()}")
    for name in ("norm_weight", "pages", "q"):
        if not floats[name].is_contiguous():
            raise ShapeError(name, "a contiguous tensor", f"strides {floats[name].stride()}")
    for name, tensor in (("kv", kv), ("q_rope", q_rope)):
        if tensor.stride(-1) != 1:
            raise ShapeError(name, "a last axis of stride 1", f"strides {tensor.stride()}")


@cuda_op("norm_rope", mutates_args=("pages", "q"))
def _norm_rope(
    kv: Tensor,
    q_rope: Tensor,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    num_nodes: Tensor,
    q: Tensor,
    eps: float,
    interleaved: bool,
    inputs_are_old: bool,
) -> None:
    streams, rows, heads, rope_dim = q_rope.shape
    if 0 in (streams, rows):
        return
    strides = (*kv.stride()[:2], *q_rope.stride()[:3])
    kernel = jit.kernel(build(norm_weight.shape[0], rope_dim, kv.dtype), "norm_rope", kv.device)
    kernel.launch(
        (1 + -(-heads // _HEADS_A_BLOCK), rows, streams),
        _THREADS,
        *(kv, q_rope, norm_weight, cos, sin, pages, block_table, prefix_len, num_nodes, q),
        *(np.int64(stride) for stride in strides),
        *(heads, pages.shape[0], block_table.shape[1], float(eps), int(interleaved), int(inputs_are_old)),
        overlap=True,
    )


@_norm_rope.register_fake
def _(*_: object) -> None:
    """Everything is written in place: there is nothing to describe."""
