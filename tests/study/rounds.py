"""Rounds of Kimi K2.6 that nobody ran, in the rows of `kdlab bench round`: known slopes, a known scale."""

import numpy as np
import pandas as pd

from kdlab.bench.rows import bench_row, rows_frame
from kdlab.study.collectives import LARGE_BYTES, MODELLED, AllReduce
from kdlab.study.gpus import MEASURED_H200
from kdlab.study.recorded_rounds import OTHER_STAGE
from kdlab.study.step_cost import Stage, Step, all_reduces, round_parts, round_stages
from tests.golden.make_parquet_v1 import PROVENANCE
from tests.study.k26 import DRAFTER, TARGET

SLOPE, REST, LAUNCH_US, PART_US, SCALE, EXTRA_US = 1.3, 0.5, 2.0, 0.1, 1.05, 100.0
POINTS = tuple((rows, streams, context, g) for rows in (1, 8, 33, 65) for streams in (1, 4) for context in (1024, 8192)
               for g in (0.8, 1.0)) + tuple((rows, 32, context, g) for rows in (1, 8) for context in (1024, 8192)
                                            for g in (0.8, 1.0))  # fmt: skip
MADE_UP = PROVENANCE | {"device": "cuda", "gpu": "a made-up GPU", "gpu_uuid": "u0"}


def made_up_us(stage: Stage) -> float:
    """Microseconds of a stage, by the numbers above."""
    moved, computed = (1e6 * stage.cost.bytes / MEASURED_H200.bytes_per_s,
                       1e6 * (stage.tiled or stage.cost.flops) / MEASURED_H200.flops_per_s)  # fmt: skip
    shorter = 0.0 if stage.hides else min(moved, computed)
    return SLOPE * max(moved, computed) + REST * shorter + LAUNCH_US * stage.launches + PART_US * stage.parts


def step_of(rows: int, streams: int, context: int, g: float, experts: str = "tp") -> Step:
    """The step that the benchmark asks of a point."""
    split = {"context": context, "ranks": 8, "experts": experts}
    return Step.routed(TARGET, rows, g, streams=streams, **split, top_k=max(1, rows - 1), committed=1)


def round_rows(
    noise: float = 0.0, *, points=POINTS, experts: str = "tp", gpus: int | None = None, waits_us: float = 0.0,
    all_reduce: AllReduce = MODELLED, **known,
) -> pd.DataFrame:  # fmt: skip
    """Rows of recorded rounds.

    Args:
        noise: relative, of every time.
        points: (rows, streams, context, g); stages are timed alone where g is below 1.
        experts: how they are split.
        gpus: whole rounds of several GPUs instead, `all_reduce` inside, and their slices without it.
        waits_us: of each of their all-reduces, beside it.
        known: of the provenance.
    """
    draw, found = np.random.default_rng(1), []
    for rows, streams, context, g in points:
        step = step_of(rows, streams, context, g, experts)
        stages = (*round_stages(TARGET, DRAFTER if rows > 1 else None, step), OTHER_STAGE)
        point = {"rows": rows, "streams": streams, "context": context}
        case = point | {"g": g, "ranks": 8, "experts": experts, "layers": 61}
        columns = point | {"provenance": MADE_UP | known, "simulated": True}
        us = (SCALE * sum(map(made_up_us, stages)) + EXTRA_US) * (1.0 + noise * draw.normal())
        if gpus:
            case |= {"gpus": gpus}
            found.append(bench_row("round", "slice", "us", case=case, samples=[us, us], **columns))
            calls, moved = all_reduces(TARGET, DRAFTER if rows > 1 else None, step)
            us += all_reduce.us(gpus, moved, calls=calls) + waits_us * calls
        found.append(bench_row("round", "round", "us", case=case, samples=[us, us], **columns))
        if g < 1.0 and not gpus:
            for stage in stages:
                us = made_up_us(stage) * (1.0 + noise * draw.normal())
                staged = case | {"stage": stage.name}
                found.append(bench_row("round", "stage", "us", case=staged, samples=[us, us], **columns))
            for inside, part in round_parts(TARGET, step):
                us, cased = made_up_us(part), case | {"stage": inside, "part": part.name}
                found.append(bench_row("round", "part", "us", case=cased, samples=[us, us], **columns))
    return rows_frame(found)


def all_reduce_rows(
    base_us: float = 5.0, hop_us: float = 0.5, ranks=(2, 4), rows=(1, 9, 33, 65), large_us: float = 0.0, **known
) -> pd.DataFrame:
    """Rows of all-reduces: base_us + hop_us a hop + 1.2 times the ring's bytes over the link + large_us if large."""
    found = []
    for number in ranks:
        for count in rows:
            size = 2 * count * 7168
            ring = 1e6 * 2.0 * (number - 1) / number * size / MEASURED_H200.link_bytes_per_s
            case = {
                "ranks": number,
                "what": "residual",
                "rows": count,
                "width": 7168,
                "bytes": size,
                "dtype": "bfloat16",
            }
            us = base_us + hop_us * 2 * (number - 1) + 1.2 * ring + large_us * (size > LARGE_BYTES)
            columns = {"provenance": MADE_UP | known, "rows": count}
            found.append(bench_row("all_reduce", "all_reduce", "us", case=case, samples=[us, us], **columns))
            found.append(bench_row("all_reduce", "chain", "us", case=case, value=10.0 * us, **columns))
    return rows_frame(found)
