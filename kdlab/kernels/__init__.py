"""Tensor ops: one a file, plain torch in `reference`."""
