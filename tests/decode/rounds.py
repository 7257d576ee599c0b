"""Comparison of two runs, round by round."""

import dataclasses

import numpy as np
import torch

from kdlab.decode.records import RoundRecord, Run
from kdlab.tree import DraftTree


def assert_same_rounds(ours: Run, theirs: Run, *, atol: float = 0.0) -> None:
    """Fail unless both hold the same texts and the same records, log-probabilities within `atol`."""
    assert ours.output_ids == theirs.output_ids
    assert ours.finish == theirs.finish
    for mine, others in zip(ours.rounds, theirs.rounds, strict=True):
        for record, other in zip(mine, others, strict=True):
            assert_same_record(record, other, atol=atol)


def assert_same_record(record: RoundRecord, other: RoundRecord, *, atol: float = 0.0) -> None:
    """Fail unless both records hold the same, in the same dtypes."""
    for field in dataclasses.fields(record):
        value, wanted = getattr(record, field.name), getattr(other, field.name)
        if isinstance(wanted, DraftTree):
            assert_same_tree(value, wanted, atol=atol)
        elif isinstance(wanted, np.ndarray):
            assert value.dtype == wanted.dtype
            assert np.array_equal(value, wanted), field.name
        else:
            assert value == wanted, field.name
            assert type(value) is type(wanted), field.name


def assert_same_tree(tree: DraftTree, other: DraftTree, *, atol: float = 0.0) -> None:
    """Fail unless both trees are the same, on the CPU: bit for bit, or floats within `atol`."""
    for field in dataclasses.fields(tree):
        value, wanted = getattr(tree, field.name), getattr(other, field.name)
        if isinstance(wanted, torch.Tensor):
            assert (value.dtype, value.shape, value.device) == (wanted.dtype, wanted.shape, torch.device("cpu"))
            assert value.is_contiguous(), field.name
            if atol and wanted.is_floating_point():
                assert torch.allclose(value, wanted, atol=atol, rtol=0.0), field.name
            else:
                assert value.numpy().tobytes() == wanted.numpy().tobytes(), field.name
        else:
            assert value == wanted, field.name
