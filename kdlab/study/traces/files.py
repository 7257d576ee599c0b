"""Traces that others measured, read like kdlab's own recordings: the one way in and out."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from kdlab.decode.field import DraftField
from kdlab.decode.field_table import FIELD_FORMAT
from kdlab.decode.round_table import ROUNDS_FORMAT
from kdlab.decode.run_row import RUN_KEY
from kdlab.decode.storage import load_field, load_run, save_field
from kdlab.errors import ArgumentError, SchemaError, TreeError
from kdlab.parquet import KIND_KEY, VERSION_KEY, read_table, table_kind, write_table
from kdlab.study.traces.field import field_faults, field_header, field_rows, read_field
from kdlab.study.traces.jsonl import Line, check_header, read_lines, write_lines
from kdlab.study.traces.rounds import ROUND_TRACE_FORMAT, RoundTrace, gather_rounds, round_faults, trace_of_run
from kdlab.study.traces.rules import provenance_faults

Trace = RoundTrace | DraftField
_VERSIONS = {ROUND_TRACE_FORMAT.kind: ROUND_TRACE_FORMAT.version, FIELD_FORMAT.kind: FIELD_FORMAT.version}
_SUFFIXES = (".jsonl", ".parquet")


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace: rounds as a RoundTrace, a draft field as the DraftField that every study takes.

    Args:
        path: a `.jsonl` or `.parquet` file in the form of `docs/traces.md`, or a Parquet file that kdlab recorded.

    Raises:
        SchemaError: the file is no trace, or the first of its faults, with its line and how many follow.
        FileNotFoundError: there is no such file.
    """
    trace, faults = _read(path)
    if trace is None or faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise SchemaError(faults[0] + more)
    return trace


def check_trace(path: str | os.PathLike[str]) -> list[str]:
    """Say everything that is wrong with a trace, a sentence a fault with file and line; none: `load_trace` reads it.

    Args:
        path: as for `load_trace`.

    Raises:
        ArgumentError: the file's name ends in neither `.jsonl` nor `.parquet`.
        FileNotFoundError: there is no such file.
    """
    try:
        return _read(path)[1]
    except (SchemaError, TreeError) as error:
        return [str(error)]


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace as JSON lines or as Parquet, by the end of its name: `path` holds all of it, or is not touched.

    Raises:
        ArgumentError: `trace` is none, or the name ends in neither `.jsonl` nor `.parquet`.
        SchemaError: its provenance or its rounds are not what the format asks for.
    """
    file = _checked_path(path)
    if isinstance(trace, RoundTrace):
        _save_rounds(trace, file)
    elif isinstance(trace, DraftField):
        _refuse_faults(file, _faults_of_field(trace))
        if file.suffix == ".parquet":
            save_field(trace, file)
        else:
            write_lines(file, field_header(trace), field_rows(trace))
    else:
        raise ArgumentError("trace", "a RoundTrace or a DraftField", type(trace).__name__)


def _save_rounds(trace: RoundTrace, file: Path) -> None:
    rows = list(trace.rows())
    _refuse_faults(file, round_faults(rows, trace.provenance))
    provenance = dict(trace.provenance)
    if file.suffix == ".parquet":
        columns = {field.name: pa.array([row[field.name] for row in rows], field.type)
                   for field in ROUND_TRACE_FORMAT.fields}  # fmt: skip
        write_table(file, columns, ROUND_TRACE_FORMAT, {RUN_KEY: json.dumps({"provenance": provenance})})
    else:
        header = {KIND_KEY: ROUND_TRACE_FORMAT.kind, VERSION_KEY: ROUND_TRACE_FORMAT.version, "provenance": provenance}
        write_lines(file, header, rows)


def _refuse_faults(file: Path, faults: Iterator[tuple[int | None, str]]) -> None:
    for index, fault in faults:
        raise SchemaError(f"{file}: {fault}" if index is None else f"{file}: row {index}: {fault}")


def _checked_path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or Path(path).suffix not in _SUFFIXES:
        raise ArgumentError("path", f"a name that ends in {' or '.join(_SUFFIXES)}", repr(path))
    return Path(path)


def _read(path: object) -> tuple[Trace | None, list[str]]:
    file = _checked_path(path)
    if not file.exists():
        raise FileNotFoundError(f"no trace at {file}")
    return _read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file)


def _read_jsonl(file: Path) -> tuple[Trace | None, list[str]]:
    faults: list[str] = []
    lines = read_lines(file, faults)
    first = next(lines, None)
    if faults:  # the header itself is no JSON: nothing after it can be judged
        return None, faults[:1]
    header = check_header(file, first, _VERSIONS)
    if header[KIND_KEY] == FIELD_FORMAT.kind:
        return read_field(file, header, lines, faults), faults
    return _read_rounds(file, header, list(lines), faults), faults


def _read_rounds(file: Path, header: dict[str, Any], lines: list[Line], faults: list[str]) -> RoundTrace | None:
    unknown = sorted(set(header) - {KIND_KEY, VERSION_KEY, "provenance"})
    faults += [f"{file}:1: unknown keys {', '.join(unknown)}"] if unknown else []
    provenance, rows = header.get("provenance"), [row for _, row in lines]
    for index, fault in round_faults(rows, provenance):
        faults.append(f"{file}:{1 if index is None else lines[index][0]}: {fault}")
    return None if faults or provenance is None else gather_rounds(rows, provenance)


def _read_parquet(file: Path) -> tuple[Trace, list[str]]:
    kind = table_kind(file)
    trace: Trace
    if kind == FIELD_FORMAT.kind:
        trace = load_field(file)
        found = _faults_of_field(trace)
    elif kind == ROUNDS_FORMAT.kind:
        trace = trace_of_run(load_run(file))
        found = round_faults(trace.rows(), trace.provenance)
    elif kind == ROUND_TRACE_FORMAT.kind:
        table, metadata = read_table(file, ROUND_TRACE_FORMAT)
        rows = table.select([field.name for field in ROUND_TRACE_FORMAT.fields]).to_pylist()
        provenance = _provenance(file, metadata)
        found = round_faults(rows, provenance)
        trace = gather_rounds(rows, provenance)
    else:
        kinds = ", ".join((*_VERSIONS, ROUNDS_FORMAT.kind))
        raise SchemaError(f"{file}: expected a table of kind {kinds}, got {kind!r}")
    return trace, [f"{file}: {fault}" if index is None else f"{file}: row {index}: {fault}" for index, fault in found]


def _faults_of_field(field: DraftField) -> Iterator[tuple[int | None, str]]:
    for fault in provenance_faults(field.provenance, of_rounds=False):
        yield None, fault
    yield from field_faults(field)


def _provenance(file: Path, metadata: dict[str, str]) -> Any:
    try:
        return json.loads(metadata[RUN_KEY])["provenance"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        expected = f"{RUN_KEY!r} in its metadata, a JSON object with provenance"
        raise SchemaError(f"{file}: expected {expected}, got {error!r:.60}") from error
