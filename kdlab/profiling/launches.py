"""Kernel launches as a table: what ran, in which stage of a round, for how long, and what the hardware counted of it.

One row is one launch (in timelines also a copy or a fill by the driver). `source` says who saw it: "ncu" replays each
kernel alone with cold caches and counts, "torch.profiler" and "nsys" watch it run and know when it began. So times of
the one and of the others are not the same quantity, and no table mixes them silently.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from kdlab.column_rules import Rule, finite, is_number, json_object, json_of
from kdlab.errors import SchemaError
from kdlab.machine import GPU_STATE_FIELDS, gpu_facts
from kdlab.parquet import TableFormat, read_table, table_of, with_version, write_table
from kdlab.paths import DATA

SOURCES = ("ncu", "torch.profiler", "nsys")
SUBJECTS = ("round", "kernels")
MODES = ("graph", "eager")
PHASES = ("prefill", "draft", "build", "verify", "accept", "commit", "other")
PREFILL = "prefill"
"""Range around a prefill, whose stages carry the names that they have in a round."""

_PHASE_STAGES = {
    "draft": ("draft context", "draft layers", "draft attention", "draft head", "draft_topk"),
    "build": ("tree_build",),
    "verify": (
        "embedding", "norms", "q_a and kv_a", "q_b", "norm_rope", "latent projections", "attention", "o_proj", "router",
        "experts", "dense layers", "lm_head", "target_sample",
        "verify_attention", "moe_int4", "skinny_linear", "add_norm",
    ),
    "accept": ("accept", "tree_accept"),
    "commit": ("commit", "kv_commit"),
}  # fmt: skip
"""Stages of `kdlab.kernels.stage` and ops of the kernel benchmark, by phase; those of several phases stand in one."""
_PHASE_OF = {stage: phase for phase, stages in _PHASE_STAGES.items() for stage in stages}

_SIZES = ("rows", "streams", "context", "layers")
_COUNTED = ("dram_read", "dram_write", "l2_read", "tensor_pct", "sm_pct", "dram_pct", "tensor_flops")
_PROVENANCE = (
    "run_id", "started_utc", "kdlab_version", "device", "gpu", "gpu_uuid", "driver", "cuda", "torch", "cpu",
    "hostname_hash", "dtype", "impl", "target_sha256", "drafter_sha256",
)  # fmt: skip
STATE_COLUMNS = tuple(f"{name}_{time}" for name in GPU_STATE_FIELDS for time in ("before", "after"))


def _has_floors(provenance: str) -> bool:
    """Floors are {case: {stage: [bytes, operations, launches]}}; a stage may have none."""
    cases = (json_of(provenance) or {}).get("floors") or {}
    return isinstance(cases, dict) and all(
        isinstance(stages, dict) and all(one is None or _is_floor(one) for one in stages.values())
        for stages in cases.values()
    )


def _is_floor(floor: object) -> bool:
    return isinstance(floor, list) and len(floor) == 3 and all(map(is_number, floor))


LAUNCHES_FORMAT = TableFormat(
    kind="kernel_launches",
    version=1,
    fields=(
        *(pa.field(name, pa.string(), nullable=False) for name in ("source", "subject", "case", "mode")),
        *(pa.field(name, pa.int64()) for name in _SIZES),
        pa.field("repeat", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        pa.field("layer", pa.int64()),
        pa.field("kernel", pa.string(), nullable=False),
        pa.field("start_us", pa.float64()),
        pa.field("duration_us", pa.float64(), nullable=False),
        *(pa.field(name, pa.float64()) for name in _COUNTED),
        pa.field("registers", pa.int64()),
        pa.field("grid", pa.string()),
        pa.field("block", pa.string()),
        pa.field("simulated", pa.bool_(), nullable=False),
        *(pa.field(name, pa.string()) for name in _PROVENANCE),
        pa.field("commit", pa.string()),
        pa.field("dirty", pa.bool_()),
        *(pa.field(name, pa.float64()) for name in STATE_COLUMNS),
        pa.field("provenance", pa.string(), nullable=False),
    ),
    rules=(
        json_object("provenance"),
        Rule(("provenance",), "floors of [bytes, operations, launches] by case and stage, if any", _has_floors),
        finite("duration_us", above=0.0),
        *(finite(name, least=0.0) for name in ("start_us", "repeat", "position", "layer", *_SIZES, *_COUNTED)),
    ),
)
"""What a row says.

`case` names the round or the op's sizes; `rows` are verify rows a stream, `context` committed rows before the round,
`layers` those of the target. `repeat` counts repetitions of a case, `position` the launches of one repetition. `stage`
is the innermost range of the domain "kdlab", "" outside of all; `layer` the target's, where ranges were set for it.
`start_us` is counted from the first launch of the repetition. `dram_read`, `dram_write` and `l2_read` are bytes;
`tensor_pct` and `dram_pct` percent of what tensor cores and memory sustain, over the kernel's whole time, and `sm_pct`
of that time in which multiprocessors hold work; `tensor_flops` bfloat16 operations on the tensor cores. `grid` and
`block` are "x, y, z". What a source does not know is empty.
`simulated` says that weights are random."""


def phase_of(stage: str) -> str:
    """Return the phase of a stage, "other" for names that belong to none."""
    return _PHASE_OF.get(stage, "other")


def launches_frame(
    rows: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, Any],
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Return launches of one run as a table of LAUNCHES_FORMAT, as `load_nsight` gives it.

    Args:
        rows: columns of LAUNCHES_FORMAT by name; what is left out is empty, `phase` follows from `stage`.
        provenance: from `run_provenance`.
        before, after: from `kdlab.machine.gpu_state`.

    Raises:
        SchemaError: a column is unknown, of a wrong type, or empty where it may not be.
    """
    states = {"before": before or {}, "after": after or {}}
    shared = {name: provenance.get(name) for name in _PROVENANCE}
    shared |= {"commit": provenance.get("git_commit"), "dirty": provenance.get("git_dirty")}
    shared |= {f"{name}_{time}": state.get(name) for time, state in states.items() for name in GPU_STATE_FIELDS}
    shared["provenance"] = json.dumps(dict(provenance), sort_keys=True)
    whole = [{"phase": phase_of(row["stage"]), **row} for row in rows]
    unknown = {name for row in whole for name in row} - {field.name for field in LAUNCHES_FORMAT.fields}
    if unknown:
        raise SchemaError(f"kernel launches: unknown columns {sorted(unknown)}")
    columns = {field.name: [row.get(field.name, shared.get(field.name)) for row in whole]
               for field in LAUNCHES_FORMAT.fields}  # fmt: skip
    return _to_frame(with_version(table_of(pd.DataFrame(columns, dtype=object), LAUNCHES_FORMAT), LAUNCHES_FORMAT))


def write_launches(launches: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write launches as one file that is there whole or not at all.

    Raises:
        SchemaError: they break LAUNCHES_FORMAT.
    """
    table = table_of(launches, LAUNCHES_FORMAT)
    write_table(path, {name: table[name] for name in table.column_names}, LAUNCHES_FORMAT)


def load_nsight(path: str | os.PathLike[str] | None = None) -> pd.DataFrame:
    """Read the launches of one machine.

    Args:
        path: a file of `kdlab profile`; None takes the one that is shipped.

    Returns:
        The columns of LAUNCHES_FORMAT; sizes, `layer` and `registers` as Int64.

    Raises:
        FileNotFoundError: there is no such file.
        SchemaError: another kind of file, an unknown source, subject, mode or phase, or GPUs that differ.
    """
    path = DATA / "recorded" / "nsight-h200.parquet" if path is None else path
    frame = _to_frame(read_table(path, LAUNCHES_FORMAT)[0])
    _check(frame, str(path))
    return frame


def rows_beside(path: str | os.PathLike[str], subject: str) -> pd.DataFrame | None:
    """Return what a file of this machine's GPU holds of the other subject; None where there is no file.

    Raises:
        SchemaError: it is another kind of file, or of another GPU.
    """
    if not os.path.exists(path):
        return None
    frame = load_nsight(path)
    here, there = gpu_facts()["gpu_uuid"], frame["gpu_uuid"].iloc[0] if len(frame) else None
    if len(frame) and there != here:
        raise SchemaError(f"{path}: holds launches of the GPU {there}, and this is {here}; write to another file")
    return frame[frame["subject"] != subject].reset_index(drop=True)


def _check(frame: pd.DataFrame, path: str) -> None:
    for name, known in (("source", SOURCES), ("subject", SUBJECTS), ("mode", MODES), ("phase", PHASES)):
        unknown = sorted(set(frame[name]) - set(known))
        if unknown:
            raise SchemaError(f"{path}: column {name!r}: expected some of {', '.join(known)}, got {unknown}")
    for name in ("gpu", "gpu_uuid"):
        found = sorted(map(str, frame[name].unique()))
        if len(found) > 1:
            raise SchemaError(f"{path}: column {name!r}: expected one machine, got {', '.join(found)}")


def _to_frame(table: pa.Table) -> pd.DataFrame:
    return table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
