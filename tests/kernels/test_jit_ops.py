"""CudaOp: ops have no gradients, and say so where some would vanish."""

import pytest
import torch

from kdlab.errors import NotSupported
from kdlab.kernels.skinny_linear import _skinny_linear


def test_gradients_that_would_vanish_are_refused():
    x, weight = (torch.empty(n, 256, dtype=torch.bfloat16, device="meta") for n in (3, 64))
    assert _skinny_linear(x, weight, False, False).shape == (3, 64)
    weight.requires_grad_()
    with pytest.raises(NotSupported, match="skinny_linear: expected no argument that requires a gradient"):
        _skinny_linear(x, weight, False, False)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert _skinny_linear(x, weight, False, False).shape == (3, 64)
