"""Arrow list columns from and to numpy arrays, one array a row, without a Python object a value."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from kdlab.errors import SchemaError


def to_list_column(arrays: Sequence[np.ndarray | None], dtype: DTypeLike, ndim: int = 1) -> pa.ListArray:
    """Nest each array's dimensions as lists of lists.

    Args:
        arrays: one array of `ndim` dimensions a row, of any sizes, or None for a null.
        dtype: of the values in the column.

    Returns:
        [len(arrays)] list^ndim of `dtype`.

    Raises:
        SchemaError: an array has another number of dimensions, or values that `dtype` does not hold.
    """
    present = [_check_array(array, dtype, ndim) for array in arrays if array is not None]
    column = pa.array(np.concatenate([array.reshape(-1) for array in present] or [np.zeros(0)]).astype(dtype))
    for axis in reversed(range(1, ndim)):
        lengths = [size for array in present for size in [array.shape[axis]] * math.prod(array.shape[:axis])]
        column = pa.ListArray.from_arrays(_offsets(lengths), column)
    nulls = pa.array([array is None for array in arrays], pa.bool_())
    return pa.ListArray.from_arrays(_offsets([0 if a is None else len(a) for a in arrays]), column, mask=nulls)


def from_list_column(column: pa.ChunkedArray, ndim: int = 1) -> list[Any]:
    """Give back what `to_list_column` took, each array with its own memory; an empty array's inner sizes are 0."""
    level = column.combine_chunks()
    nulls = level.is_null().to_numpy(zero_copy_only=False)
    offsets = level.offsets.to_numpy()
    starts, ends = offsets[:-1], offsets[1:]
    counts = [ends - starts]
    for _ in range(ndim - 1):
        level = level.values
        offsets = level.offsets.to_numpy()
        starts, ends = offsets[starts], offsets[ends]
        counts.append(ends - starts)
    values = without_nulls(level.values).to_numpy()
    sizes = [counts[0], *(inner // np.maximum(outer, 1) for outer, inner in itertools.pairwise(counts))]
    shapes = np.stack(sizes, axis=1)
    return [
        None if null else _shaped(values[start:end], shape)
        for null, start, end, shape in zip(nulls, starts, ends, shapes, strict=True)
    ]


def without_nulls(values: Any) -> Any:
    """Return Arrow `values`, or raise SchemaError where one is null: numpy would make floats of them all."""
    if values.null_count:
        raise SchemaError(f"list column: expected {values.type} values, got {values.null_count} nulls")
    return values


def _check_array(array: np.ndarray, dtype: DTypeLike, ndim: int) -> np.ndarray:
    if array.ndim != ndim:
        raise SchemaError(f"list column: expected arrays of {ndim} dimensions, got shape {list(array.shape)}")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise SchemaError(f"list column: expected values of {np.dtype(dtype)}, got {array.dtype}")
    if array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(np.dtype(dtype))
        if array.min() < limits.min or array.max() > limits.max:
            raise SchemaError(f"list column: values {array.min()}..{array.max()} do not fit {np.dtype(dtype)}")
    return array


def _shaped(values: np.ndarray, shape: np.ndarray) -> np.ndarray:
    if values.size != math.prod(shape.tolist()):
        raise SchemaError(f"list column: expected inner lists of equal lengths, got {values.size} values for {shape}")
    return values.reshape(shape).copy()


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *lengths]), pa.int32())
