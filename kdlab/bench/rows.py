"""The result row: one measured number with its spread, its unit, what was measured, where and with what bytes."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from kdlab.bench.row_rules import ROW_RULES
from kdlab.errors import ArgumentError
from kdlab.machine import GPU_STATE_FIELDS
from kdlab.parquet import TableFormat, read_table, table_of, with_version, write_table

_FROM_PROVENANCE = {
    "run_id": pa.string(), "started_utc": pa.string(), "kdlab_version": pa.string(),
    "device": pa.string(), "gpu": pa.string(), "gpu_uuid": pa.string(), "driver": pa.string(), "cuda": pa.string(),
    "torch": pa.string(), "cpu": pa.string(), "threads": pa.int32(), "hostname_hash": pa.string(),
    "streams": pa.int32(), "graph": pa.string(), "impl": pa.string(), "dtype": pa.string(),
    "target_sha256": pa.string(), "drafter_sha256": pa.string(), "prompt_set_id": pa.string(),
    "prompt_set_digest": pa.string(), "num_prompts": pa.int32(), "template_hash": pa.string(), "thinking": pa.bool_(),
    "max_new_tokens": pa.int32(), "temperature": pa.float64(), "top_p": pa.float64(),
}  # fmt: skip
"""Columns that stand in the provenance under the same name; `temperature` is the sampling temperature."""

_STATE_TIMES = ("before", "after")
STATE_COLUMNS = tuple(f"{name}_{time}" for name in GPU_STATE_FIELDS for time in _STATE_TIMES)

ROWS_FORMAT = TableFormat(
    kind="bench_rows",
    version=1,
    fields=(
        pa.field("op", pa.string(), nullable=False),
        pa.field("case", pa.string(), nullable=False),
        pa.field("method", pa.string()),
        pa.field("setting", pa.float64()),
        pa.field("budget", pa.int32()),
        pa.field("rows", pa.int32()),
        pa.field("context", pa.int32()),
        pa.field("metric", pa.string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
        pa.field("unit", pa.string(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        *(pa.field(name, pa.float64()) for name in ("median", "p10", "p90")),
        pa.field("samples", pa.list_(pa.float64())),
        pa.field("sample_prompts", pa.list_(pa.int32())),
        pa.field("simulated", pa.bool_(), nullable=False),
        pa.field("note", pa.string()),
        *(pa.field(name, kind) for name, kind in _FROM_PROVENANCE.items()),
        pa.field("commit", pa.string()),
        pa.field("dirty", pa.bool_()),
        *(pa.field(name, pa.float64()) for name in STATE_COLUMNS),
        pa.field("provenance", pa.string(), nullable=False),
    ),
    rules=ROW_RULES,
)
"""What a row says. `case` is JSON: the op's sizes and options. `rows` are verify rows, `context` committed rows before
the round, `setting` what the method turns (budget, chain length, beam width). `value` is the number to quote: the
median where there are samples. `sample_prompts` is the prompt's index of each sample. `provenance` is JSON, whole."""


def summarize_samples(samples: Iterable[float]) -> dict[str, float]:
    """Return n, median, p10 and p90 of at least one finite sample; percentiles are linearly interpolated."""
    values = np.asarray(list(samples), dtype=np.float64)
    if not values.size or not np.isfinite(values).all():
        raise ArgumentError("samples", "at least one, all finite", values.tolist())
    p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist()
    return {"n": int(values.size), "median": median, "p10": p10, "p90": p90}


def bench_row(
    op: str,
    metric: str,
    unit: str,
    *,
    provenance: Mapping[str, Any],
    case: Mapping[str, Any],
    samples: Sequence[float] | None = None,
    value: float | None = None,
    simulated: bool = False,
    **columns: Any,
) -> dict[str, Any]:
    """Make one row: a summary of `samples`, or one `value` that has no spread.

    Args:
        op, metric, unit: what was measured, as which quantity, in what unit.
        provenance: from `run_provenance`; fills the columns about code, machine, models and prompts.
        case: sizes and options of the op.
        samples: kept in the row beside their summary.
        value: instead of samples.
        simulated: whether acceptance is made up or weights are random.
        columns: further columns of ROWS_FORMAT; they win over the provenance.

    Raises:
        ArgumentError: a column is unknown, or not exactly one of samples and value is given and finite.
    """
    unknown = set(columns) - {field.name for field in ROWS_FORMAT.fields}
    if unknown:
        raise ArgumentError("columns", "columns of ROWS_FORMAT", sorted(unknown))
    row: dict[str, Any] = {"op": op, "case": json.dumps(dict(case), sort_keys=True), "metric": metric, "unit": unit}
    row |= {"simulated": simulated, "provenance": json.dumps(dict(provenance), sort_keys=True)}
    row |= {name: provenance.get(name) for name in _FROM_PROVENANCE}
    row |= {"commit": provenance.get("git_commit"), "dirty": provenance.get("git_dirty")}
    return row | _numbers(samples, value) | columns


def state_columns(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the clock and temperature columns from `kdlab.machine.gpu_state` before and after the samples."""
    states = dict(zip(_STATE_TIMES, (before, after), strict=True))
    return {f"{name}_{time}": state[name] for name in GPU_STATE_FIELDS for time, state in states.items()}


def rows_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows of `bench_row` as a table with the columns and types that `read_rows` gives."""
    columns = {field.name: [row.get(field.name) for row in rows] for field in ROWS_FORMAT.fields}
    return with_version(table_of(pd.DataFrame(columns, dtype=object), ROWS_FORMAT), ROWS_FORMAT).to_pandas()


def samples_frame(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row a sample, for comparisons that pair arms by prompt.

    Returns:
        Columns run_id, op, case, method, setting, budget, rows, metric, unit, value and prompt (its index), from the
        rows that hold their samples' prompts.
    """
    lists = ["samples", "sample_prompts"]
    kept = ["run_id", "op", "case", "method", "setting", "budget", "rows", "metric", "unit", *lists]
    long = rows.loc[rows["samples"].notna() & rows["sample_prompts"].notna(), kept].explode(lists, ignore_index=True)
    long = long.rename(columns={"samples": "value", "sample_prompts": "prompt"})
    return long.astype({"value": np.float64, "prompt": np.int64})


def write_rows(rows: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write rows as one file that is there whole or not at all.

    Raises:
        SchemaError: they break ROWS_FORMAT.
    """
    table = table_of(rows, ROWS_FORMAT)
    write_table(path, {name: table[name] for name in table.column_names}, ROWS_FORMAT)


def read_rows(*paths: str | os.PathLike[str]) -> pd.DataFrame:
    """Read the rows of one or more files, in order; columns that an older file did not have are empty.

    Raises:
        ArgumentError: no path.
        SchemaError: a file is of another kind, or newer than this kdlab.
        FileNotFoundError: there is no such file.
    """
    if not paths:
        raise ArgumentError("paths", "at least one file", "none")
    return pa.concat_tables([read_table(path, ROWS_FORMAT)[0] for path in paths]).to_pandas()


def _numbers(samples: Sequence[float] | None, value: float | None) -> dict[str, Any]:
    if (samples is None) == (value is None):
        raise ArgumentError("samples, value", "exactly one of them", "neither" if value is None else "both")
    if samples is not None:
        summary = summarize_samples(samples)
        return {**summary, "value": summary["median"], "samples": [float(sample) for sample in samples]}
    if value is None or not math.isfinite(value):
        raise ArgumentError("value", "a finite number", value)
    return {"n": 1, "value": float(value), "median": None, "p10": None, "p90": None, "samples": None}
