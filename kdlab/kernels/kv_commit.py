"""kv_commit: move the accepted tree rows behind the prefix in every layer, and gather their tapped hidden rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kdlab.checks import check_choice, check_int, check_integer_tensor, check_shape
from kdlab.errors import ArgumentError, ShapeError, UnsupportedDevice
from kdlab.kernels import jit, reference
from kdlab.kernels.constants import PAGE_SIZE
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit.ops import cuda_op
from kdlab.kernels.reference import gather_path

_UNITS = (16, 8, 4, 2, 1)  # bytes of one memory instruction
_THREADS = 256  # a block, where the path leaves room for more than one column
_GATHER_AT_ONCE = 4  # as in the .cu
_MAX_DEPTH = 1024  # a block holds one thread a depth
MAX_TAPS = 8  # as in the .cu

BUILDS = (jit.Build("kv_commit.cu", (("UNIT", 16),)),)


def kv_commit(
    pages: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    path: Tensor,
    *,
    taps: Sequence[Tensor] = (),
    impl: str = "auto",
) -> Tensor | None:
    """Move the rows of each stream's path down behind its prefix, in place, in all layers, in one launch.

    Row prefix_len + d becomes what row prefix_len + path[d] was, d = 1..L; it keeps its rotation, because a node at
    depth d was rotated for position prefix_len + d. On a GPU a stream whose path, prefix or pages lead out of the block
    table or of `pages` does not move at all (nothing can be raised without a synchronisation; `tree_accept` reports
    malformed trees before); the reference raises on the CPU.

    Args:
        pages: [layers, P, 64, W] any dtype, contiguous.
        block_table: [S, M] i32, pages of each stream.
        prefix_len: [S] i32, rows before the root.
        path: [S, L + 1] i32, accepted row indices, root first, -1 padded; -1 throughout for a stream that rests.
        taps: [S, N, F] of any one dtype, rows of the tree to be gathered along the path; none, or up to 8.
        impl: "auto", "cuda" or "reference".

    Returns:
        Rows of all taps side by side along the path [S, L + 1, taps * F], zeros where path is -1; None without taps.

    Raises:
        ShapeError: the arguments do not fit one another. ArgumentError: an unknown impl, a path above 1,025 rows, taps
            that are no list or tuple or more than 8, a row outside the block table (CPU only). UnsupportedDevice:
            "cuda" for tensors on another device.
    """
    check_choice("impl", impl, ("auto", "cuda", "reference"))
    if impl == "cuda" and not pages.is_cuda:
        raise UnsupportedDevice(f"kv_commit: impl 'cuda' needs CUDA tensors, pages are on {pages.device}")
    _check(pages, block_table, prefix_len, path, taps)
    if impl == "reference" or not pages.is_cuda:
        reference.kv_commit(pages, block_table, prefix_len, path)
        return gather_path(torch.cat(list(taps), dim=-1), path) if taps else None
    _check_for_kernel(pages, block_table, prefix_len, path)
    gathered = taps[0].new_empty(*path.shape, len(taps) * taps[0].shape[2]) if taps else None
    _kv_commit(pages, block_table, prefix_len, path, [tap.contiguous() for tap in taps], gathered)
    return gathered


def kv_commit_cost(num_layers: int, row_bytes: int, moved: int, tap_bytes: int = 0, gathered: int = 0) -> Cost:
    """Return the cost of moving `moved` rows of `row_bytes` in each layer and gathering rows of `tap_bytes`."""
    return Cost(2 * (num_layers * row_bytes * moved + tap_bytes * gathered))


def _check(pages: Tensor, block_table: Tensor, prefix_len: Tensor, path: Tensor, taps: Sequence[Tensor]) -> None:
    check_shape("pages", pages, ["layers", "P", PAGE_SIZE, "W"])
    streams = check_shape("block_table", block_table, ["S", "M"])["S"]
    check_shape("prefix_len", prefix_len, [streams])
    check_shape("path", path, [streams, "L+1"])
    check_int("path.shape[1]", path.shape[1], minimum=1, maximum=_MAX_DEPTH + 1)
    if not pages.is_contiguous():
        raise ShapeError("pages", "a contiguous tensor, as rows move in place", f"strides {pages.stride()}")
    named = {"block_table": block_table, "prefix_len": prefix_len, "path": path}
    for name, tensor in named.items():
        check_integer_tensor(name, tensor)
    if not isinstance(taps, list | tuple):
        raise ArgumentError("taps", "a list or tuple of tensors", type(taps).__name__)
    check_int("taps", len(taps), minimum=0, maximum=MAX_TAPS)
    for i, tap in enumerate(taps):
        check_shape(f"taps[{i}]", tap, [streams, "N", "F"] if i == 0 else list(taps[0].shape))
        if tap.dtype != taps[0].dtype:
            raise ShapeError(f"taps[{i}]", f"{taps[0].dtype}, as the first", tap.dtype)
        named[f"taps[{i}]"] = tap
    for name, tensor in named.items():
        if tensor.device != pages.device:
            raise ShapeError(name, f"on {pages.device}", tensor.device)


def _check_for_kernel(pages: Tensor, block_table: Tensor, prefix_len: Tensor, path: Tensor) -> None:
    for name, tensor in (("block_table", block_table), ("prefix_len", prefix_len), ("path", path)):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ShapeError(name, "contiguous int32", f"{tensor.dtype}, strides {tensor.stride()}")


@cuda_op("kv_commit", mutates_args=("pages", "gathered"))
def _kv_commit(
    pages: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    path: Tensor,
    taps: list[Tensor],
    gathered: Tensor | None,
) -> None:
    streams, path_len = path.shape
    row_bytes, tap_bytes = _bytes_of_row(pages), _bytes_of_row(taps[0]) if taps else 0
    unit = _unit(row_bytes, tap_bytes, *(t.data_ptr() for t in (pages, *taps, gathered) if t is not None))
    depth, columns = max(path_len - 1, 1), row_bytes // unit
    # Slices of equal width; two columns at least, because half a 32-byte sector is read whole.
    slices = max(-(-columns // max(_THREADS // depth, min(2, _MAX_DEPTH // depth))), 1)
    width = max(-(-columns // slices), 1)
    num_layers = pages.shape[0] if path_len > 1 else 0
    tap_units = tap_bytes // unit
    parts = -(-path_len * len(taps) * tap_units // (width * depth * _GATHER_AT_ONCE))
    grid = (slices, num_layers + -(-parts // slices), streams)
    if 0 in grid:
        return
    num_rows = taps[0].shape[1] if taps else 0
    sizes = (len(taps), num_layers, pages.shape[1], block_table.shape[1], columns, path_len, num_rows, tap_units)
    kernel = jit.kernel(jit.Build("kv_commit.cu", (("UNIT", unit),)), "kv_commit", pages.device)
    sources = (*taps, *[None] * (MAX_TAPS - len(taps)))
    kernel.launch(grid, (width, depth), pages, block_table, prefix_len, path, *sources, gathered, *sizes, overlap=True)


@_kv_commit.register_fake
def _(*_: object) -> None:
    """Everything is written in place: there is nothing to describe."""


def _bytes_of_row(rows: Tensor) -> int:
    return rows.shape[-1] * rows.element_size()


def _unit(*multiples: int) -> int:
    """Return the widest memory instruction that divides row widths and addresses alike."""
    return next(unit for unit in _UNITS if all(value % unit == 0 for value in multiples))
