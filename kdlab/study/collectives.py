"""The time of a round's all-reduces: modelled, or fitted to measured ones and carried on to more ranks.

One all-reduce takes a fixed time, a time for each of the 2 (ranks - 1) hops of a ring, and the ring's bytes over the
link. Modelled, the fixed time is ALL_REDUCE_US whatever the ranks. Measured, it is longer above LARGE_BYTES: of rows of
7,168 over two H200 96 take 15.2 us and 128 take 26.2, where 74 take 13.4 and 192 take 27.6. These are times of chains
of all-reduces. A round takes longer still: the kernel behind a collective of NCCL does not begin early, as
behind one of kdlab's, and ranks wait for one another. That is a wait for each of them, fitted to whole rounds of
several GPUs: one where experts are products of matrices (sliced ones from 68 rows on, whole ones from 80), one
elsewhere, as the recorded rounds fall in two there: 1 to 5 us below, 8 to 13 above, and 72 rows of sliced experts are
above, of whole ones below. There the shared expert runs on a branch beside the routed ones, which gains a slice on one
GPU 3 to 4 % and the round over two 0 to 0.8 %. That is part of it, though without such a branch such rounds waited
longer too, 7 us; the rest is not known. With one wait for all, rounds of 128 rows come out too short by up to 7 %.
"""

import json
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError
from kdlab.kernels.moe_builds import many_rows
from kdlab.study.compare import check_table
from kdlab.study.gpus import MEASURED_H200, Gpu
from kdlab.study.recorded_rounds import recorded_step
from kdlab.study.step_cost import Step, all_reduces

ALL_REDUCE_US = MEASURED_H200.all_reduce_us
"""A small all-reduce over NVLink in a graph; modelled."""
LARGE_BYTES = 3 << 19
"""Above it an all-reduce takes longer by a step: somewhere between 96 rows of 7,168 (1.38 MB) and 128 (1.84 MB)."""
_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class AllReduce:
    """us = base_us + hop_us * 2 (ranks - 1) + ring * (bytes of a ring over the link) + a wait, and large_us.

    Attributes:
        base_us, hop_us: of a chain of them; scaled by what a GPU's small all-reduce is assumed to take.
        ring: 1 at the link's rate.
        measured_ranks: numbers of ranks that it was fitted to; none: modelled.
        residuals: (fitted - measured) / measured, a point each.
        wait_us, many_wait_us: what a round waits for each beside it, see `with_waits`; the latter where experts are
            products of matrices, see `experts_are_products`.
        large_us: of one that moves more than LARGE_BYTES.
    """

    base_us: float
    hop_us: float
    ring: float
    measured_ranks: tuple[int, ...] = ()
    residuals: tuple[float, ...] = ()
    wait_us: float = 0.0
    many_wait_us: float = 0.0
    large_us: float = 0.0

    def us(
        self, ranks: int, num_bytes: float, gpu: Gpu = MEASURED_H200, calls: int = 1, *, products: bool = False
    ) -> float:
        """Return microseconds of `calls` all-reduces that together move `num_bytes`; 0 on one rank.

        Args:
            ranks: that take part.
            num_bytes: of all of them.
            gpu: of each rank.
            calls: how many.
            products: of a round whose experts are products of matrices.
        """
        if ranks == 1:
            return 0.0
        fixed = (self.base_us + self.hop_us * 2 * (ranks - 1)) * gpu.all_reduce_us / ALL_REDUCE_US
        fixed += self.large_us if num_bytes > calls * LARGE_BYTES else 0.0
        wait_us = self.many_wait_us if products else self.wait_us
        return calls * (fixed + wait_us) + self.ring * _ring_us(ranks, num_bytes, gpu)

    def source(self, ranks: int) -> str:
        """Say where the time for so many ranks comes from."""
        if not self.measured_ranks:
            return f"modelled, {self.base_us:g} µs each and the ring's bytes"
        known = f"measured on {' and '.join(str(number) for number in self.measured_ranks)} GPUs"
        if self.wait_us or self.many_wait_us:
            known += f", with {self.wait_us:.1f} µs each that whole rounds take beside them"
        if self.many_wait_us != self.wait_us:
            known += f", {self.many_wait_us:.1f} where experts are products of matrices"
        if ranks in self.measured_ranks:
            return known
        if len(self.measured_ranks) == 1:
            return f"{known}; {ranks} are taken to have the same fixed time and waits, which is the least they can be"
        return f"{known}, carried on to {ranks}"


MODELLED = AllReduce(ALL_REDUCE_US, 0.0, 1.0)


def fit_all_reduce(rows: pd.DataFrame, gpu: Gpu = MEASURED_H200) -> AllReduce:
    """Fit measured all-reduces by least squares of the relative error, nothing below zero.

    Args:
        rows: result rows, of which those of op and metric "all_reduce" are taken; their cases hold ranks, rows, width
            and dtype.
        gpu: what they were measured on. The hops' time is fitted only where several numbers of ranks were measured.

    Raises:
        ArgumentError: no such row, or one that took no time.
        ComparisonError: they are of different GPUs or commits.
    """
    timed = rows[(rows["op"] == "all_reduce") & (rows["metric"] == "all_reduce")]
    if timed.empty:
        raise ArgumentError("rows", "times of all-reduces", "none")
    check_table(timed, fields=("gpu", "commit"))
    cases = [json.loads(text) for text in timed["case"]]
    us = timed["value"].to_numpy(dtype=np.float64)
    if us.min() <= 0:
        raise ArgumentError("rows", "times of all-reduces above 0", f"{us.min()} of {timed['case'].iloc[us.argmin()]}")
    ranks = [case["ranks"] for case in cases]
    moved = [case["rows"] * case["width"] * _BYTES[case["dtype"]] for case in cases]
    large = [float(size > LARGE_BYTES) for size in moved]
    hops = [2.0 * (n - 1) for n in ranks]
    rings = [_ring_us(n, size, gpu) for n, size in zip(ranks, moved, strict=True)]
    terms = np.stack([np.ones(len(us)), hops, rings, large], axis=1)
    known = tuple(sorted(set(ranks)))
    if len(known) == 1:
        terms[:, 1] = 0.0
    found, _ = nnls(terms / us[:, None], np.ones(len(us)))
    base_us, hop_us, ring, large_us = found.tolist()
    residuals = tuple((terms @ found / us - 1.0).tolist())
    return AllReduce(base_us, hop_us, ring, known, residuals, large_us=large_us)


def with_waits(
    all_reduce: AllReduce, rows: pd.DataFrame, target: TargetConfig, drafter: DrafterConfig, gpu: Gpu = MEASURED_H200
) -> AllReduce:
    """Return it with both waits fitted to whole rounds of several GPUs, each beside its slice without collectives.

    Args:
        all_reduce: of `fit_all_reduce`.
        rows: of `kdlab bench round --gpus`; rounds of one GPU, or without a slice, are passed over.
        target, drafter: constants of the models whose rounds were timed.
        gpu: what they were measured on.

    Raises:
        ArgumentError: a round is there twice.
    """
    cases = [json.loads(text) for text in rows["case"]]
    several = [op == "round" and case.get("gpus", 1) > 1 for op, case in zip(rows["op"], cases, strict=True)]
    timed = rows[np.array(several, dtype=bool)]  # an empty list would choose no columns
    twice = timed.loc[timed.duplicated(["case", "metric"]), "case"]
    if len(twice):
        raise ArgumentError("rows", "each round once", f"{twice.iloc[0]} twice")
    wide = timed.pivot(index="case", columns="metric", values="value")
    if not {"round", "slice"} <= set(wide.columns):
        return all_reduce
    found, alone = [], replace(all_reduce, wait_us=0.0, many_wait_us=0.0)
    for text, us, slice_us in wide[["round", "slice"]].dropna().itertuples():
        case = json.loads(text)
        model = replace(target, num_hidden_layers=case["layers"])
        step = recorded_step(case, target)
        calls, moved = all_reduces(model, drafter if case["rows"] > 1 else None, step)
        apart_us = slice_us + alone.us(case["gpus"], moved, gpu, calls)
        found.append((us, apart_us, calls, experts_are_products(model, step)))
    if not found:
        return all_reduce
    wait_us, many_wait_us = fit_waits(*zip(*found, strict=True))
    return replace(all_reduce, wait_us=wait_us, many_wait_us=many_wait_us)


def fit_waits(us: ArrayLike, apart_us: ArrayLike, calls: ArrayLike, products: ArrayLike) -> tuple[float, float]:
    """Return the least squares of the relative error of us = apart_us + wait * calls, at least 0.

    Args:
        us: whole rounds, [n], at least one.
        apart_us: the same without collectives, and their collectives alone, [n].
        calls: all-reduces of each, [n].
        products: bool, of which experts are products of matrices, [n].

    Returns:
        The wait of those whose are not, and of those whose are; the same where there is only one kind.
    """
    whole, apart, number = (np.asarray(values, dtype=np.float64) for values in (us, apart_us, calls))
    many = np.asarray(products, dtype=bool)
    kinds = [kind for kind in (~many, many) if kind.any()]
    waits = [nnls((number / whole)[kind, None], (1.0 - apart / whole)[kind])[0].item() for kind in kinds]
    return waits[0], waits[-1]


def experts_are_products(target: TargetConfig, step: Step) -> bool:
    """Whether a step has so many rows that kdlab's kernels compute its routed experts as products of matrices."""
    sliced = step.ranks if step.experts == "tp" else 1
    return target.experts_int4 and step.tokens >= many_rows(target.moe_intermediate_size // sliced)


def collectives_us(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    step: Step,
    gpu: Gpu = MEASURED_H200,
    all_reduce: AllReduce = MODELLED,
) -> float:
    """Return microseconds of all of a round's all-reduces; the drafter's are left out for AR (no drafter)."""
    calls, moved = all_reduces(target, drafter, step)
    return all_reduce.us(step.ranks, moved, gpu, calls, products=experts_are_products(target, step))


def _ring_us(ranks: int, num_bytes: float, gpu: Gpu) -> float:
    return 1e6 * 2.0 * (ranks - 1) / ranks * num_bytes / gpu.link_bytes_per_s
