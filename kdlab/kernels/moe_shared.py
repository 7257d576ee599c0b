"""The shared expert of a few rows: two products of skinny_linear, of which moe_int4 adds the result."""

from torch import Tensor

from kdlab.kernels.skinny_linear import FLOAT, GATED, choose_linear, run_skinny


def run_shared(x: Tensor, gate_up: Tensor, down: Tensor, y: Tensor) -> bool:
    """Write the shared expert's result, where skinny_linear is the way; else launch nothing and return False.

    Beside the routed experts it is a few blocks of many slabs each: 13 us on an H200, for one row and one rank of 8 of
    Kimi K2.6, whose bytes take 2.7 us.

    Args:
        x: [T, D] contiguous.
        gate_up: [1, 2I, D] contiguous, gate rows first.
        down: [1, D, I] contiguous.
        y: [T, D] float32 to be written; rows may be strided.
    """
    rows, hidden = x.unsqueeze(0), x.new_empty(1, len(x), down.shape[2])
    if not choose_linear(rows, gate_up) == choose_linear(hidden, down) == "skinny":
        return False
    run_skinny(rows, gate_up, hidden, GATED)
    run_skinny(hidden, down, y.unsqueeze(0), FLOAT)
    return True
