"""The collectives of a round, timed as rounds run them: in captured chains, each behind what uses the one before.

What a collective adds is the time of a link of the chain with it less that of a link without it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from kdlab.bench.rows import bench_row, rows_frame, state_columns
from kdlab.bench.timing import Call, Pass, require_gpu, sample
from kdlab.checks import check_float
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError
from kdlab.kernels.add_norm import add_norm
from kdlab.kernels.capture import capture
from kdlab.machine import gpu_state, link_facts
from kdlab.model.ranks import ONE_RANK, Ranks
from kdlab.paths import DATA, K26_SHAPES
from kdlab.provenance import run_provenance
from kdlab.study.step_cost import Step

ROWS = (1, 2, 4, 8, 16, 32, 33, 64, 65, 72, 74, 96, 128, 192, 264, 520, 1056, 2080)
"""Rows of an all-reduce: those of one stream, some between 65 and 264, 33 and 65 rows of eight and of 32 streams."""
LINKS = 64
RECORDED = DATA / "recorded" / "all-reduce-h200.parquet"
SPLIT = 8
"""Ranks that share the models of the messages: the sizes are those of one rank of so many."""
_DTYPE, _EPS = torch.bfloat16, 1e-6

Progress = Callable[[int, int], None]


def messages(
    drafter: DrafterConfig | None, ranks: int, *, streams: int, rows: int, top_k: int = 64
) -> dict[str, int]:
    """Return the bytes that each rank gives to a round's gatherings, by what they are of.

    Args:
        drafter: constants; None for AR.
        ranks: that share the models.
        streams: S.
        rows: N, rows verified a stream.
        top_k: draft candidates a slot.

    Returns:
        "target_sample" (greedy) and, with a drafter, "draft_topk", both padded as `gather_fields` does, and "features".
    """
    wanted = {"target_sample": streams * rows * 20}
    if drafter is not None:
        wanted["draft_topk"] = streams * drafter.depth_limit * (8 * top_k + 9)
        wanted["features"] = streams * drafter.block_size * drafter.hidden_size // ranks * _DTYPE.itemsize
    return {name: -(-nbytes // 8) * 8 for name, nbytes in wanted.items()}


def sum_chain(
    ranks: Ranks, rows: int, width: int, *, links: int, device: torch.device, dtype: torch.dtype = _DTYPE
) -> Call:
    """Return a call of `links` times add_norm and the all-reduce of its norm, as between the products of a layer.

    Args:
        ranks: that add up; one rank leaves the all-reduce out.
        rows, width: of the summands.
        links: how often.
        device, dtype: of the summands.

    Returns:
        A call without arguments; it returns the stream and the last sum, [rows, width] each.
    """
    first = torch.ones(2, rows, width, dtype=dtype, device=device)
    weight = torch.ones(width, dtype=dtype, device=device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        stream, update = first.unbind()
        for _ in range(links):
            stream, update = add_norm(stream, update, weight, _EPS)
            ranks.all_reduce(update, "mlp")
        return stream, update

    return run


def gather_chain(ranks: Ranks, nbytes: int, *, links: int, device: torch.device) -> Call:
    """Return a call of `links` times the gathering of a message and a kernel that makes the next one of the last part.

    Args:
        ranks: that gather; one rank leaves the gathering out.
        nbytes: of a rank's message.
        links: how often.
        device: of the message.

    Returns:
        A call without arguments; it returns the last message [nbytes] u8.
    """
    first = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def run() -> torch.Tensor:
        own = first
        for _ in range(links):
            own = ranks.all_gather(own, "head")[-1] + 1
        return own

    return run


def bench_collectives(ranks: Ranks, *, seconds: float = 5.0, progress: Progress | None = None) -> pd.DataFrame:
    """Time the all-reduces and gatherings of Kimi K2.6's rounds over real ranks.

    Args:
        ranks: from `init_ranks`; every one makes this call.
        seconds: for all cases together.
        progress: called with (cases done, cases in all).

    Returns:
        Rows of ROWS_FORMAT, on every rank alike, of ops "all_reduce" and "all_gather". Metric as the op: what one adds
        to a link, of the slowest rank; "chain" and "between": a link with it and without it.

    Raises:
        UnsupportedDevice: no GPU. ArgumentError: one rank alone, or no time.
    """
    check_float("seconds", seconds, above=0.0)
    require_gpu("bench collectives")
    if ranks.group is None or ranks.device is None:
        raise ArgumentError("ranks", "several, each on its own GPU", "one alone")
    device = ranks.device
    target, drafter = TargetConfig.load(K26_SHAPES / "target"), DrafterConfig.load(K26_SHAPES / "drafter")
    provenance = run_provenance(
        device=device, dtype=_DTYPE, ranks=ranks.size, backend=dist.get_backend(), graph="graph", **link_facts(device)
    )
    before, found, cases = gpu_state(device), [], _cases(ranks.size, target.hidden_size, drafter)
    for done, (op, case, chain) in enumerate(cases):
        times = _time_chain(partial(chain, links=LINKS, device=device), ranks, seconds / len(cases))
        found += _rows(op, case, times, provenance)
        if progress is not None:
            progress(done + 1, len(cases))
    state = state_columns(before, gpu_state(device))
    return rows_frame([row | state for row in found])


@dataclass(frozen=True)
class CollectiveTimes:
    """Recorded times of collectives: medians in microseconds, between the sizes that were measured."""

    rows: pd.DataFrame  # of `bench_collectives`, of any numbers of ranks

    def round_us(self, target: TargetConfig, drafter: DrafterConfig | None, step: Step, ranks: int) -> float:
        """Return what the collectives of one round add, greedily decoded; see `kdlab.study.step_cost.all_reduces`.

        Args:
            target, drafter: constants; no drafter for AR.
            step: what the round is asked for.
            ranks: that talk to one another, step.ranks or fewer.

        Raises:
            ArgumentError: nothing was measured for so many ranks, or for such sizes.
        """
        sums, gathers = self._medians("all_reduce", ranks, "rows"), self._medians("all_gather", ranks, "bytes")
        us = (1 + 2 * target.num_hidden_layers) * _between(sums, step.tokens)
        if drafter is not None:
            block = step.streams * drafter.block_size
            us += (1 + 2 * drafter.num_hidden_layers) * _between(sums, block)
        sizes = messages(drafter, step.ranks, streams=step.streams, rows=step.rows, top_k=step.top_k)
        return us + sum(_between(gathers, size) for size in sizes.values())

    def _medians(self, op: str, ranks: int, size: str) -> pd.Series:
        table = collective_table(self.rows)
        found = table[(table["op"] == op) & (table["ranks"] == ranks)]
        if found.empty:
            raise ArgumentError("collectives", f"times of {op} over {ranks} ranks", sorted(set(table["ranks"])))
        return found.groupby(size)["us"].median()


def collective_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one line a case of `bench_collectives`.

    Returns:
        op, ranks, what ("residual" of an all-reduce), rows, bytes (of a rank's message), us, p10, p90 (of what the
        collective adds), chain_us and between_us.

    Raises:
        ArgumentError: no such rows, or one is there twice.
    """
    timed = rows[rows["op"].isin(["all_reduce", "all_gather"])]
    twice = timed[timed.duplicated(["op", "case", "metric"])]
    if len(twice):
        raise ArgumentError("rows", "each time once", f"{twice['metric'].iloc[0]} of {twice['case'].iloc[0]} twice")
    timed = timed.set_index(["op", "case"])
    added = timed[timed["metric"] == timed.index.get_level_values("op")]
    if added.empty:
        raise ArgumentError("rows", "rows of `kdlab bench collectives`", "none")
    found = added[["value", "p10", "p90"]].rename(columns={"value": "us"})
    for name in ("chain", "between"):
        found[f"{name}_us"] = timed.loc[timed["metric"] == name, "value"]
    cases = pd.DataFrame([json.loads(case) for case in found.index.get_level_values("case")], index=found.index)
    table = found.join(cases).reset_index()
    return table[["op", "ranks", "what", "rows", "bytes", "us", "p10", "p90", "chain_us", "between_us"]]


def _cases(ranks: int, width: int, drafter: DrafterConfig) -> list[tuple[str, dict[str, Any], Callable[..., Call]]]:
    """Return (op, case, chain) of everything that is timed."""
    itemsize, shared = _DTYPE.itemsize, {"ranks": ranks, "dtype": str(_DTYPE).removeprefix("torch.")}
    found: list[tuple[str, dict[str, Any], Callable[..., Call]]] = []
    for rows in ROWS:
        case = shared | {"what": "residual", "rows": rows, "width": width, "bytes": rows * width * itemsize}
        found.append(("all_reduce", case, partial(sum_chain, rows=rows, width=width)))
    for streams, rows in ((1, 1), (1, 65), (8, 65), (32, 65)):
        for what, nbytes in messages(drafter, SPLIT, streams=streams, rows=rows).items():
            if what == "target_sample" or rows > 1:
                case = shared | {"what": what, "rows": streams * rows, "bytes": nbytes}
                found.append(("all_gather", case, partial(gather_chain, nbytes=nbytes)))
    return found


def _time_chain(chain: Callable[[Ranks], Call], ranks: Ranks, seconds: float) -> dict[str, list[float]]:
    passes = {}
    for name, those in (("chain", ranks), ("between", ONE_RANK)):
        call = chain(those)
        passes[name] = Pass(capture([call]).replay, LINKS, (call,))
    return sample(passes, seconds, ranks)


def _rows(
    op: str, case: dict[str, Any], times: dict[str, list[float]], provenance: dict[str, Any]
) -> list[dict[str, Any]]:
    without = float(np.median(times["between"]))
    named = {op: [us - without for us in times["chain"]], **times}
    return [
        bench_row(op, metric, "us", case=case, samples=samples, rows=case["rows"], provenance=provenance)
        for metric, samples in named.items()
    ]


def _between(medians: pd.Series, size: float) -> float:
    """Return the time at a size, on the line between the measured sizes beside it."""
    if not medians.index.min() <= size <= medians.index.max():
        raise ArgumentError(medians.index.name, f"{medians.index.min()} to {medians.index.max()}, as measured", size)
    return float(np.interp(size, medians.index, medians))
