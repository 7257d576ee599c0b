"""What each op is to reach on an H200, as the design sets it: microseconds in a CUDA graph."""

from collections.abc import Callable, Mapping
from typing import Any

from kdlab.kernels.cost import Cost

Medians = Callable[[str, Mapping[str, Any], str], float | None]
"""Median microseconds in a graph of (op, sizes, arm) in the same run; None where it was not timed."""

GOAL_GPU = "H200"
"""Part of the name of the card that the goals are set for; on another none is judged."""

_READ_BYTES_PER_S, _MATRIX_FLOPS_PER_S, _KERNEL_US = 4.14e12, 785e12, 1.06
"""What the design read on that card: goals do not move with the reading of a day. The rates that a run measures make
its floors; no kernel takes less than an empty one."""

MMA_SHARE = 0.6
"""What the portable attention kernel must reach of the rate of mma.sync alone, where operations are its bound."""

_TREE_BUILD_US = {64: 8.0, 256: 15.0, 1024: 40.0}


def goal_us(op: str, sizes: Mapping[str, Any], cost: Cost, medians: Medians) -> float | None:
    """Return the most that kdlab's arm of a case may take; None where no goal is set or its yardstick was not timed.

    Args:
        op, sizes, cost: of the case.
        medians: the times that a goal is relative to.
    """
    floor_us = cost.floor_us(bytes_per_s=_READ_BYTES_PER_S, flops_per_s=_MATRIX_FLOPS_PER_S)
    if op == "draft_topk" and sizes["k"] == 64:
        return 8.0 if sizes["streams"] == 1 else 2.0 * max(floor_us, _KERNEL_US)
    if op == "tree_build":
        return _tree_build_us(sizes, medians)
    if op == "verify_attention":
        flashmla = medians(op, sizes, "flashmla prefix")
        return None if flashmla is None else max(0.75 * flashmla, floor_us / 0.83 + 4.0)
    if op == "target_sample":
        return 2.0 * max(floor_us, _KERNEL_US)
    if op == "tree_accept" and (sizes["streams"], sizes["rows"]) == (8, 64):
        return 2.5
    if op == "kv_commit" and (sizes["streams"], sizes["moved"], sizes["tap_width"]) == (1, 8, 0):
        return 5.0
    return floor_us / 0.75 if op == "moe_int4" else None


def mma_goal_us(op: str, sizes: Mapping[str, Any], flops: int, mma_flops_per_s: float) -> float | None:
    """Return the most that the arm "mma" may take at the size that its goal is about, None at others.

    Args:
        op, sizes: of the case.
        flops: operations of the case.
        mma_flops_per_s: measured rate of mma.sync alone.
    """
    about = {"streams": 8, "rows": 33, "prefix": 4096, "heads": 64}
    if op != "verify_attention" or dict(sizes) != about:
        return None
    return 1e6 * flops / (MMA_SHARE * mma_flops_per_s)


def _tree_build_us(sizes: Mapping[str, Any], medians: Medians) -> float | None:
    """Eight streams may take a tenth more than one."""
    if sizes["streams"] == 1:
        return _TREE_BUILD_US.get(sizes["budget"])
    alone = medians("tree_build", {**sizes, "streams": 1}, "cuda")
    return None if alone is None else 1.1 * alone
