"""Arguments of launches: what was found for some types is not taken for others; no GPU needed."""

import numpy as np
import pytest
import torch

from kdlab.errors import ArgumentError
from kdlab.kernels.jit.launch import Kernel


def test_types_that_a_kernel_has_not_seen_are_looked_at(monkeypatch):
    queued = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Kernel, "_queue", lambda self, config, values: queued.append(values))
    stand_in = Kernel.__new__(Kernel)
    stand_in.name, stand_in._index, stand_in._sizes, stand_in._packers = "f", 0, (4, 8), {}
    stand_in._configs = {(1, 32, 0, None, False): "prepared"}
    for first in (3, 2.5, True, 4):
        stand_in.launch(1, 32, first, None)
    assert queued == [[3, 0], [2.5, 0], [1, 0], [4, 0]]
    assert [type(values[0]) for values in queued] == [np.int32, np.float32, np.int32, np.int32]
    for args, what in (((3, 2.5), "argument 1: expected a value of 8 bytes"), ((3,), "2 arguments, got 1")):
        with pytest.raises(ArgumentError, match=what):
            stand_in.launch(1, 32, *args)
    assert len(queued) == 4
