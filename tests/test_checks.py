"""Argument checks and the errors they raise."""

import math
import pickle

import numpy as np
import pytest
import torch

from kdlab.checks import check_float, check_int, check_integer_tensor
from kdlab.errors import ArgumentError, ShapeError


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3)], ids=repr)
def test_integers_of_every_kind(value):
    assert check_int("n", value, minimum=3, maximum=3) == 3


@pytest.mark.parametrize("value", [True, 3.0, "3", None, 2, 5], ids=repr)
def test_what_is_no_integer_in_range(value):
    with pytest.raises(ArgumentError, match=r"^n: expected .*, got "):
        check_int("n", value, minimum=3, maximum=4)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.float64(1)], ids=repr)
def test_numbers_of_every_kind(value):
    assert check_float("x", value, above=0, maximum=1) == float(value)


@pytest.mark.parametrize("value", [True, "0.5", None, math.nan, math.inf, 0, 1.5, np.bool_(True)], ids=repr)
def test_what_is_no_number_in_range(value):
    with pytest.raises(ArgumentError, match=r"^x: expected a .*number.*, got "):
        check_float("x", value, above=0, maximum=1)


def test_a_refused_number_names_both_limits():
    with pytest.raises(ArgumentError, match=r"^x: expected a number above 0 and below 1, got 1$"):
        check_float("x", 1, above=0, below=1)
    with pytest.raises(ArgumentError, match=r"at least 0 and at most 1, got -1"):
        check_float("x", -1, minimum=0, maximum=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
def test_only_integers_are_ids(dtype):
    check_integer_tensor("ids", torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ShapeError, match="ids: expected an integer dtype"):
        check_integer_tensor("ids", torch.zeros(1, dtype=dtype))


def test_an_error_survives_the_way_to_another_process():
    error = ArgumentError("budget", "at least 0", -1)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "budget: expected at least 0, got -1"
    assert (copy.argument, copy.expected, copy.got) == ("budget", "at least 0", -1)
