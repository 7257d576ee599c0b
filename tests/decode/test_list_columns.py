"""Arrays to Arrow list columns and back, bit for bit."""

import numpy as np
import pyarrow as pa
import pytest

from kdlab.decode.list_columns import from_list_column, to_list_column
from kdlab.errors import SchemaError


def test_every_shape_is_kept():
    rng = np.random.default_rng(0)
    shapes = [(3, 4, 2), None, (3, 1, 2), (1, 5, 3), (0, 0, 0)]
    arrays = [None if s is None else rng.integers(-9, 9, s).astype(np.int16) for s in shapes]
    column = pa.chunked_array([to_list_column(arrays, np.int16, 3)])
    for part in (slice(0, 5), slice(1, 4)):
        back = from_list_column(column[part.start : part.stop], 3)
        for array, got in zip(arrays[part], back, strict=True):
            np.testing.assert_equal(got, array)
            assert got is None or got.dtype == np.int16
    assert column.to_pylist() == [None if a is None else a.tolist() for a in arrays]


def test_nan_and_infinities_are_kept():
    values = np.array([np.nan, -np.inf, -0.0, 1e-45], np.float32)
    (back,) = from_list_column(pa.chunked_array([to_list_column([values], np.float32)]))
    assert back.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 2), np.int32), "1 dimensions"),
        (np.zeros(2, np.float32), "expected values of int16, got float32"),
        (np.array([40000]), "do not fit int16"),
    ],
)
def test_what_the_column_cannot_hold_is_refused(array, message):
    with pytest.raises(SchemaError, match=message):
        to_list_column([array], np.int16)


def test_inner_lists_of_unequal_lengths_are_refused():
    column = pa.chunked_array([pa.array([[[1, 2], [3]]], pa.list_(pa.list_(pa.int16())))])
    with pytest.raises(SchemaError, match="equal lengths"):
        from_list_column(column, 2)
