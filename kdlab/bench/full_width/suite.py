"""The full-width benchmark: which points, what becomes of their times, and the goals they are held against."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch

from kdlab.bench.collectives import RECORDED
from kdlab.bench.full_width.point import Measured, Point, measure
from kdlab.bench.full_width.random_pair import random_pair
from kdlab.bench.kernels.ceilings import Ceilings, measure_ceilings
from kdlab.bench.rows import bench_row, read_rows, rows_frame, state_columns
from kdlab.bench.timing import require_gpu
from kdlab.checks import check_float, check_int
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import UnsupportedDevice
from kdlab.machine import gpu_state, link_facts
from kdlab.model.pair import Pair
from kdlab.model.ranks import Ranks
from kdlab.paths import K26_SHAPES
from kdlab.provenance import run_provenance
from kdlab.study.collectives import MODELLED, AllReduce, collectives_us, fit_all_reduce
from kdlab.study.step_cost import LAUNCH_US, Stage, round_stages

ROWS = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128)
_FEW_ROWS = (1, 8, 17, 33, 65)
STREAMS, CONTEXTS, ROUTINGS = (1, 4, 8, 16, 32), (1024, 8192, 32768), (0.8, 1.0)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RoundBench:
    """What a run found: rows of ROWS_FORMAT, and what was left out."""

    rows: pd.DataFrame
    messages: tuple[str, ...]


def points() -> list[tuple[Point, bool]]:
    """Return every point and whether its stages are timed alone, the most telling ones first: time may run out.

    One stream has all numbers of rows, more streams a few. Long contexts and rows that route independently come last.
    """
    found = [(Point(rows, 1, context, g), g < 1.0) for context in CONTEXTS for g in ROUTINGS for rows in ROWS]
    more = [Point(rows, streams, context, g) for streams in STREAMS[1:] for context in CONTEXTS[:2]
            for g in ROUTINGS for rows in _FEW_ROWS]  # fmt: skip
    found += [(point, point.g < 1.0 and point.context == CONTEXTS[0]) for point in more]
    return sorted(found, key=lambda each: (each[0].context == CONTEXTS[-1], each[0].g, each[0].context))


def rank_points() -> list[tuple[Point, bool]]:
    """Return the points of several GPUs, no stage alone: AR, 9, 33 and 65 rows of 1 and 8 streams, then the others."""
    first = [Point(rows, streams, CONTEXTS[0], ROUTINGS[0]) for streams in (1, 8) for rows in (1, 9, 33, 65)]
    others = [point for point, _ in points() if point.context in CONTEXTS[:2] and point not in first]
    return [(point, False) for point in [*first, *others]]


def bench_round(
    *,
    ranks: int = 8,
    experts: str = "tp",
    running: Ranks | None = None,
    layers: int | None = None,
    seconds: float = 300.0,
    chosen: Sequence[tuple[Point, bool]] | None = None,
    progress: Progress | None = None,
) -> RoundBench:
    """Time rounds of Kimi K2.6 at its true shapes, with random weights: one rank's slice on this GPU, or real ranks.

    One slice runs no collectives: a row of their own holds what `kdlab.study.collectives` lets expect. Real ranks run
    theirs inside the round, and the round once more without them. Routing is planned so that the rows touch
    U = 384 (1 - (1 - 8/384)^(S n^g)) experts a layer.

    Args:
        ranks: whose slice is made; 1 makes whole layers.
        experts: "tp" or "ep", which those of `running` have too.
        running: from `init_ranks`: the first slices of `ranks` are made, one each, and these ranks talk to one another;
            every one makes this call. None makes one slice.
        layers: of the target; None takes all 61, which fit one GPU from 8 ranks on.
        seconds: no point is begun after it.
        chosen: (point, with its stages); None takes `points()`, or of real ranks `rank_points()`.
        progress: called with (points done, points in all).

    Raises:
        UnsupportedDevice: no GPU, or no room for the weights; on real ranks, or for a point.
        ArgumentError: ranks do not divide the model, or an argument is out of range.
    """
    require_gpu("bench round")
    seconds, begin = check_float("seconds", seconds, above=0.0), time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    place = Ranks.slice_of(0, ranks, experts) if running is None else running.among(ranks)
    pair = k26_pair(place, layers, device)
    ceilings, before = measure_ceilings(), gpu_state(device)
    all_reduce = fit_all_reduce(read_rows(RECORDED)) if RECORDED.exists() else MODELLED
    provenance = run_provenance(
        device=device, dtype=pair.dtype, target_config=pair.target.config, target_sha256=pair.target_sha256,
        drafter_sha256=pair.drafter_sha256, ranks=ranks, experts=experts, graph="graph", impl="auto",
        gpus=ranks - place.missing, **({} if running is None else link_facts(device)),
    )  # fmt: skip
    every = points if running is None else rank_points
    wanted, rows, messages = list(every() if chosen is None else chosen), [], []
    for done, (point, with_stages) in enumerate(wanted):
        if place.largest([time.monotonic() - begin])[0] > seconds:
            messages.append(f"out of time: {len(wanted) - done} points left out, from {point}")
            break
        try:
            rows += _rows(pair, measure(pair, point, stages=with_stages), ceilings, all_reduce, provenance)
        except (torch.OutOfMemoryError, UnsupportedDevice) as error:
            if place.group is not None:  # the others are inside the round
                raise
            messages.append(f"{point}: left out, {str(error).splitlines()[0]}")
        torch.cuda.empty_cache()
        if progress is not None:
            progress(done + 1, len(wanted))
    state = state_columns(before, gpu_state(device))
    return RoundBench(rows_frame([row | state for row in rows]), tuple(messages))


def k26_pair(ranks: Ranks, layers: int | None, device: torch.device) -> Pair:
    """Return a rank's slice of Kimi K2.6 and its drafter with random weights, of all layers or the first `layers`."""
    target, drafter = TargetConfig.load(K26_SHAPES / "target"), DrafterConfig.load(K26_SHAPES / "drafter")
    if layers is not None:
        check_int("layers", layers, minimum=1, maximum=target.num_hidden_layers)
        taps = tuple(layer * (layers - 1) // (target.num_hidden_layers - 1) for layer in drafter.target_layer_ids)
        target = replace(target, num_hidden_layers=layers)
        drafter = replace(drafter, num_target_layers=layers, target_layer_ids=taps)
    return random_pair(target, drafter, ranks=ranks, device=device)


def _rows(
    pair: Pair, found: Measured, ceilings: Ceilings, all_reduce: AllReduce, provenance: dict[str, Any]
) -> list[dict[str, Any]]:
    config = pair.target.config
    drafter = None if found.point.rows == 1 or pair.drafter is None else pair.drafter.config
    stages = {stage.name: stage for stage in round_stages(config, drafter, found.step)}
    floors = {name: _floor_us(stage, ceilings) for name, stage in stages.items()}
    columns: dict[str, Any] = {
        "provenance": provenance,
        "simulated": True,
        "method": "ar" if found.point.rows == 1 else "ddtree",
        "setting": float(found.point.rows - 1),
        "rows": found.point.rows,
        "streams": found.point.streams,
        "context": found.point.context,
    }
    gpus = pair.ranks.size - pair.ranks.missing
    case = found.case | {"layers": config.num_hidden_layers, "gpus": gpus}
    note = "one CUDA graph" if not found.alone else f"one CUDA graph, collectives of {gpus} of {pair.ranks.size} ranks"
    rows = [
        bench_row("round", "round", "us", case=case, samples=found.whole, note=note, **columns),
        bench_row("round", "floor", "us", case=case, value=sum(floors.values()), **columns),
        bench_row("round", "loop", "us", case=case, value=found.loop_us, note="launch, copy, read", **columns),
    ]
    if found.alone:
        note = "the round without its collectives"
        rows.append(bench_row("round", "slice", "us", case=case, samples=found.alone, note=note, **columns))
    else:
        us = collectives_us(config, drafter, found.step, all_reduce=all_reduce)
        note = all_reduce.source(found.step.ranks)
        rows.append(bench_row("round", "collectives", "us", case=case, value=us, note=note, **columns))
    for name, samples in found.stages.items():
        staged = case | {"stage": name}
        rows.append(bench_row("round", "stage", "us", case=staged, samples=samples, **columns))
        if name in floors:
            rows.append(bench_row("round", "stage floor", "us", case=staged, value=floors[name], **columns))
    return rows


def _floor_us(stage: Stage, ceilings: Ceilings) -> float:
    rates = {"bytes_per_s": 1e12 * ceilings["read"], "flops_per_s": 1e12 * ceilings["matrix"]}
    return stage.floor_us(**rates, launch_us=LAUNCH_US)
