"""skinny_linear: products of a few rows with a weight matrix, where reading the weights is all the time.

cuBLAS leaves half of the bandwidth unused at these shapes: one rank of 8 has matrices of 1 to 30 MB. Here a cluster of
blocks shares the inputs of a tile of outputs, and a kernel begins to read its weights before the one ahead has ended.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kdlab.checks import check_choice, check_float_tensor, check_shape
from kdlab.errors import NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import jit, reference
from kdlab.kernels.constants import MMA_DTYPES
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit.layouts import by_layout
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.library_linear import library_linear, under_autocast
from kdlab.kernels.skinny_plan import (
    ALIGNMENT,
    LARGE,
    MAX_ROWS,
    MIN_STAGES,
    ROWS,
    SAME_ROWS,
    SLAB,
    THREADS,
    Plan,
    build,
    count_blocks,
    has_room,
    holds_all,
    make_plan,
    shared_bytes,
)

_FEW_BLOCKS, _MOST_BLOCKS = 300, 600
_LARGE_ROWS = 40  # that a matrix from LARGE on still wins at
PLAIN, FLOAT, GATED = 0, 1, 2  # what `run_skinny` makes of the sums, as in the .cu


def skinny_linear(
    x: Tensor, weight: Tensor, *, gated: bool = False, dtype: torch.dtype | None = None, impl: str = "auto"
) -> Tensor:
    """Multiply rows by a weight matrix: y = x W^T, or silu(x G^T) * (x U^T) for W = [G; U].

    The kernel's result of a row does not depend on how many rows there are, up to SAME_ROWS, bit for bit; under "auto"
    it does, where torch runs for more rows than `choose_linear` gives to the kernel. The kernel may read the weights
    before the one ahead in the stream has ended: nothing may have written them just before.

    Args:
        x: [T, K] float; rows may be strided.
        weight: [N, K] in x's dtype; rows may be strided.
        gated: W is N/2 gate rows, then N/2 up rows; the result is [T, N/2].
        dtype: of the result: x's, or float32.
        impl: "auto" (what `choose_linear` says for CUDA tensors, the reference for others), "cuda" or "reference".

    Returns:
        [T, N] or [T, N/2]. The kernel sums in float32 and rounds once; torch sums as its library does, and rounds the
        two products of a gated result, and the silu, before they are multiplied.

    Raises:
        ShapeError: the arguments do not fit one another. NotSupported: impl "cuda" for what the kernel does not take.
        UnsupportedDevice: "cuda" for tensors on another device, or on a GPU without clusters of blocks or without room
        for so many rows. ArgumentError: an unknown impl.
    """
    way = _way(x, weight, gated, dtype, impl, impl == "reference" and under_autocast(x))
    if way == "reference":
        return reference.skinny_linear(x, weight, gated=gated, dtype=dtype)
    if way == "wide" and dtype is not None:
        return torch.mm(x, weight.mT, out_dtype=dtype)  # without float32 copies of both
    if way == "library":
        y = library_linear(x, weight)
        return reference.gate_halves(y) if gated else y
    return _skinny_linear(x, weight, gated, dtype is torch.float32 and x.dtype != dtype)


@by_layout
def _way(x: Tensor, weight: Tensor, gated: bool, dtype: torch.dtype | None, impl: str, mixes: bool) -> str:
    """Check the arguments of `skinny_linear`; return what runs: "skinny", "reference", "library" or its "wide" sums."""
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    inputs = check_shape("x", x, ["T", "K"])["K"]
    check_float_tensor("x", x)
    features = check_shape("weight", weight, ["N", inputs])["N"]
    _check_alike("weight", x, weight, impl, mixes)
    if gated and (dtype is not None or features % 2):
        raise ShapeError("weight", "an even number of rows and dtype None when gated", (features, dtype))
    if dtype not in (None, x.dtype, torch.float32):
        raise ShapeError("dtype", f"{x.dtype} or float32", dtype)
    if impl == "reference" or not x.is_cuda:
        return "reference"
    if impl == "auto" and choose_linear(x.unsqueeze(0), weight.unsqueeze(0)) == "torch":
        if dtype in (None, x.dtype):
            return "library"
        return "wide" if x.dtype in MMA_DTYPES else "reference"
    _check_for_kernel(x.unsqueeze(0), weight.unsqueeze(0))
    return "skinny"


def skinny_matmul(x: Tensor, weight: Tensor, *, out: Tensor | None = None, impl: str = "auto") -> Tensor:
    """Multiply rows by a matrix of their own in each of B places, as torch.bmm does.

    Args:
        x: [B, T, K] float; strided, values of a row side by side.
        weight: [B, K, N] in x's dtype; either axis may be the one of stride 1.
        out: [B, T, N] in x's dtype to be written, strided; a new tensor when None.
        impl: as in `skinny_linear`.

    Returns:
        [B, T, N], which the kernel sums in float32 and rounds once, and torch as its library does.

    Raises:
        As `skinny_linear`.
    """
    if out is None:
        out = x.new_empty(_product_shape(x, weight))
    if not _runs_skinny(x, weight, out, impl, impl == "reference" and under_autocast(x)):
        return out.copy_(torch.bmm(x, weight)) if not x.is_cuda else torch.bmm(x, weight, out=out)
    _skinny_matmul(x, weight, out)
    return out


@by_layout
def _product_shape(x: Tensor, weight: Tensor) -> list[int]:
    sizes = check_shape("x", x, ["B", "T", "K"])
    return [sizes["B"], sizes["T"], check_shape("weight", weight, [sizes["B"], sizes["K"], "N"])["N"]]


@by_layout
def _runs_skinny(x: Tensor, weight: Tensor, out: Tensor, impl: str, mixes: bool) -> bool:
    """Check the arguments of `skinny_matmul`; say whether the kernel runs."""
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    check_shape("out", out, _product_shape(x, weight))
    check_float_tensor("x", x)
    for name, other in (("weight", weight), ("out", out)):
        _check_alike(name, x, other, impl, mixes)
    if impl == "reference" or not x.is_cuda or (impl == "auto" and choose_linear(x, weight.mT) == "torch"):
        return False
    _check_for_kernel(x, weight.mT)
    if out.stride(-1) != 1 or any(n % 4 for n in out.stride()[:2]):
        raise NotSupported("out", "rows of stride 1 at multiples of 4 values", out.stride())
    return True


def choose_linear(x: Tensor, weight: Tensor) -> str:
    """Return "skinny" where the kernel runs and is the faster one, "torch" elsewhere.

    Both are the same product, in other orders of adding. Measured on an H200 against cuBLAS, in CUDA graphs: at one
    rank's shapes of Kimi K2.6 the kernel takes 0.4 to 0.8 of its time at 1 to 8 rows, 0.7 to 0.9 at 33, 0.7 to 1.0 at
    64, and 0.8 to 0.9 at 72 of those that `holds_all` names; from 60 MB on the two meet at 33 rows.

    Args:
        x: [B, T, K] on a GPU.
        weight: [B, N, K].
    """
    if unsupported(x, weight) is not None:
        return "torch"
    arch, sizes = jit.arch_of(x.device), _sizes(x, weight)
    if (x.shape[1] > _LARGE_ROWS and weight[0].numel() >= LARGE) or not has_room(*sizes, arch):
        return "torch"
    plan = make_plan(*sizes, arch)
    blocks = count_blocks(plan, weight.shape[1], len(weight))
    if x.shape[1] > SAME_ROWS and not holds_all(plan, *sizes[1:]):
        return "torch"
    # Many blocks come in waves, each with its own start and end: all 64 heads' W_UK takes 4.5 us against 4.9 at one
    # row, 8.0 against 6.0 at 33, their q_b 9.4 against 12.2 and 14.6 against 12.7.
    if blocks > _MOST_BLOCKS or (blocks > _FEW_BLOCKS and plan.rows > 16):
        return "torch"
    return "skinny"


def skinny_linear_cost(num_rows: int, features: int, inputs: int, *, matrices: int = 1, itemsize: int = 2) -> Cost:
    """Return the cost of `num_rows` rows times `matrices` matrices of [features, inputs]: each byte once."""
    values = features * inputs + num_rows * (features + inputs)
    return Cost(matrices * values * itemsize, 2 * matrices * num_rows * features * inputs)


def unsupported(x: Tensor, weight: Tensor) -> str | None:
    """Say what the kernel does not take of x [B, T, K] and weight [B, N, K], None where it takes all."""
    columns = weight.stride(-1) != 1
    if x.dtype not in MMA_DTYPES:
        return f"bfloat16 or float16, not {x.dtype}"
    if not 1 <= x.shape[1] <= MAX_ROWS:
        return f"1 to {MAX_ROWS} rows, not {x.shape[1]}"
    if 0 in weight.shape:
        return f"at least one matrix, output and input, not {tuple(weight.shape)}"
    if x.shape[2] % SLAB or weight.shape[1] % (64 if columns else 8):
        return f"inputs by {SLAB} and outputs by {64 if columns else 8}, not {tuple(weight.shape)}"
    if x.stride(-1) != 1 or weight.stride(-2 if columns else -1) != 1:
        return f"values side by side, not strides {x.stride()} and {weight.stride()}"
    # Storages begin at multiples of 512 bytes; the op looks at the addresses themselves.
    rows = (*x.stride()[:2], weight.stride(0), weight.stride(-1 if columns else -2))
    if any(n % 8 for n in (*rows, x.storage_offset(), weight.storage_offset())):
        return f"rows at multiples of {ALIGNMENT} bytes, not strides {x.stride()} and {weight.stride()}"
    return None


def _check_for_kernel(x: Tensor, weight: Tensor) -> None:
    problem = unsupported(x, weight)
    if problem:
        raise NotSupported("skinny_linear", problem.split(", not ")[0], problem.split(", not ")[-1])


def _check_alike(name: str, x: Tensor, other: Tensor, impl: str, mixes: bool) -> None:
    if impl == "cuda" and not x.is_cuda:
        raise UnsupportedDevice(f"skinny_linear: impl 'cuda' needs CUDA tensors, x is on {x.device}")
    # Under autocast torch's own rules hold for the reference, which then `mixes` dtypes.
    if (other.dtype != x.dtype and not mixes) or other.device != x.device:
        raise ShapeError(name, f"{x.dtype} on {x.device}, as x", f"{other.dtype} on {other.device}")


def _plan_for(x: Tensor, weight: Tensor, arch: str) -> Plan:
    plan = make_plan(*_sizes(x, weight), arch)
    if plan.stages < MIN_STAGES:
        raise UnsupportedDevice(f"skinny_linear: a block of {arch} has no room for {x.shape[1]} rows of this matrix")
    return plan


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
    """Return T, N, K and B of x [B, T, K] and weight [B, N, K]."""
    return x.shape[1], weight.shape[1], weight.shape[2], weight.shape[0]


def run_skinny(x: Tensor, weight: Tensor, y: Tensor, epilogue: int, plan: Plan | None = None) -> None:
    """Launch: x [B, T, K], weight [B, N, K] (strides say which axis is contiguous), y [B, T, N] strided; or no B."""
    if (x.data_ptr() | weight.data_ptr() | y.data_ptr()) % ALIGNMENT:
        found = tuple(matrix.data_ptr() % ALIGNMENT for matrix in (x, weight, y))
        raise ShapeError("x, weight and out", f"storage at multiples of {ALIGNMENT} bytes", f"{found} bytes behind one")
    made = _prepare(x, weight, y, plan)
    jit.kernel(made.build, made.name, x.device).launch(
        made.grid,
        THREADS,
        *(x, weight, y, *made.sizes, epilogue),
        shared_bytes=made.shared_bytes,
        cluster=made.cluster,
        overlap=True,
    )


class _Launch(NamedTuple):
    """What a launch takes besides its tensors."""

    build: jit.Build
    name: str
    grid: tuple[int, int]
    sizes: tuple[object, ...]
    shared_bytes: int
    cluster: int | None


@by_layout
def _prepare(x: Tensor, weight: Tensor, y: Tensor, plan: Plan | None) -> _Launch:
    if x.dim() == 2:
        x, weight, y = x.unsqueeze(0), weight.unsqueeze(0), y.unsqueeze(0)
    plan = plan or _plan_for(x, weight, jit.arch_of(x.device))
    columns = weight.stride(-1) != 1
    name = "skinny_linear_columns" if columns else "skinny_linear"
    features, inputs = weight.shape[1:]
    w_row = weight.stride(-1 if columns else -2)
    strides = (x.stride(1), x.stride(0), w_row, weight.stride(0), y.stride(1), y.stride(0))
    sizes = (x.shape[1], features, inputs, *(np.int64(stride) for stride in strides))
    grid = (-(-features // plan.tile) * plan.split, x.shape[0])
    cluster = None if plan.split == 1 else plan.split
    return _Launch(build(x.dtype, plan), name, grid, sizes, shared_bytes(plan), cluster)


@cuda_op("skinny_linear")
def _skinny_linear(x: Tensor, weight: Tensor, gated: bool, wide: bool) -> Tensor:
    features, epilogue = weight.shape[0], GATED if gated else FLOAT if wide else PLAIN
    y = x.new_empty(x.shape[0], features // 2 if gated else features, dtype=torch.float32 if wide else x.dtype)
    run_skinny(x, weight, y, epilogue)
    return y


@_skinny_linear.register_fake
def _(x: Tensor, weight: Tensor, gated: bool, wide: bool) -> Tensor:
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    return x.new_empty(x.shape[0], features, dtype=torch.float32 if wide else x.dtype)


@cuda_op("skinny_matmul", mutates_args=("out",))
def _skinny_matmul(x: Tensor, weight: Tensor, out: Tensor) -> None:
    run_skinny(x, weight.mT, out, PLAIN)


@_skinny_matmul.register_fake
def _(*_: object) -> None:
    """`out` is written in place: there is nothing to describe."""


# Of a rank of 8: the shape of q_a with kv_a, whose builds most small matrices share, those of q_b and of W_UK where
# they have their own, and that of the drafter's fc.
BUILDS = (
    *(build(torch.bfloat16, make_plan(rows, 2112, 7168, 1)) for rows in ROWS if rows <= SAME_ROWS),
    *(build(torch.bfloat16, make_plan(rows, 1536, 1536, 1)) for rows in ROWS if rows > SAME_ROWS),
    *(build(torch.bfloat16, make_plan(rows, 512, 128, 8)) for rows in (8, MAX_ROWS)),
    *(build(torch.bfloat16, make_plan(rows, 7168, 5376, 1)) for rows in ROWS if rows <= _LARGE_ROWS),
)
