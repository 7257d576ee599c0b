"""The time of a round's all-reduces: modelled, or fitted to measured ones and carried on to more ranks.

One all-reduce takes a fixed time, a time for each of the 2 (ranks - 1) hops of a ring, and the ring's bytes over the
link. Modelled, the fixed time is ALL_REDUCE_US whatever the ranks.
"""

import json
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError
from kdlab.study.compare import check_table
from kdlab.study.gpus import MEASURED_H200, Gpu
from kdlab.study.step_cost import Step, all_reduces

ALL_REDUCE_US = MEASURED_H200.all_reduce_us
"""A small all-reduce over NVLink in a graph; modelled."""
_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class AllReduce:
    """us = base_us + hop_us * 2 (ranks - 1) + ring * (bytes of a ring over the link); `ring` is 1 at the link's rate.

    Attributes:
        measured_ranks: numbers of ranks that it was fitted to; none: modelled.
        residuals: (fitted - measured) / measured, a point each.
    """

    base_us: float
    hop_us: float
    ring: float
    measured_ranks: tuple[int, ...] = ()
    residuals: tuple[float, ...] = ()

    def us(self, ranks: int, num_bytes: float, gpu: Gpu = MEASURED_H200, calls: int = 1) -> float:
        """Return microseconds of `calls` all-reduces that together move `num_bytes`; 0 on one rank."""
        if ranks == 1:
            return 0.0
        fixed = (self.base_us + self.hop_us * 2 * (ranks - 1)) * gpu.all_reduce_us / ALL_REDUCE_US
        return calls * fixed + self.ring * _ring_us(ranks, num_bytes, gpu)

    def source(self, ranks: int) -> str:
        """Say where the time for so many ranks comes from."""
        if not self.measured_ranks:
            return f"modelled, {self.base_us:g} us each and the ring's bytes"
        known = f"measured on {' and '.join(str(number) for number in self.measured_ranks)} GPUs"
        if ranks in self.measured_ranks:
            return known
        if len(self.measured_ranks) == 1:
            return f"{known}; {ranks} are taken to have the same fixed time, which is the least it can be"
        return f"{known}, carried on to {ranks}"


MODELLED = AllReduce(ALL_REDUCE_US, 0.0, 1.0)


def fit_all_reduce(rows: pd.DataFrame, gpu: Gpu = MEASURED_H200) -> AllReduce:
    """Fit measured all-reduces by least squares of the relative error, nothing below zero.

    Args:
        rows: result rows, of which those of op and metric "all_reduce" are taken; their cases hold ranks, rows, width
            and dtype.
        gpu: what they were measured on. The hops' time is fitted only where several numbers of ranks were measured.

    Raises:
        ArgumentError: no such row.
        ComparisonError: they are of different GPUs or commits.
    """
    timed = rows[(rows["op"] == "all_reduce") & (rows["metric"] == "all_reduce")]
    if timed.empty:
        raise ArgumentError("rows", "times of all-reduces", "none")
    check_table(timed, fields=("gpu", "commit"))
    cases = [json.loads(text) for text in timed["case"]]
    us = timed["value"].to_numpy(dtype=np.float64)
    ranks = [case["ranks"] for case in cases]
    moved = [case["rows"] * case["width"] * _BYTES[case["dtype"]] for case in cases]
    terms = np.array([[1.0, 2.0 * (n - 1), _ring_us(n, size, gpu)] for n, size in zip(ranks, moved, strict=True)])
    known = tuple(sorted(set(ranks)))
    if len(known) == 1:
        terms[:, 1] = 0.0
    found, _ = nnls(terms / us[:, None], np.ones(len(us)))
    base_us, hop_us, ring = found.tolist()
    return AllReduce(base_us, hop_us, ring, known, tuple((terms @ found / us - 1.0).tolist()))


def collectives_us(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    step: Step,
    gpu: Gpu = MEASURED_H200,
    all_reduce: AllReduce = MODELLED,
) -> float:
    """Return microseconds of all of a round's all-reduces; the drafter's are left out for AR (no drafter)."""
    calls, moved = all_reduces(target, drafter, step)
    return all_reduce.us(step.ranks, moved, gpu, calls)


def _ring_us(ranks: int, num_bytes: float, gpu: Gpu) -> float:
    return 1e6 * 2.0 * (ranks - 1) / ranks * num_bytes / gpu.link_bytes_per_s
