"""Versioned Parquet tables: an explicit schema, files that appear whole, and old files that stay readable.

A schema grows only by nullable columns and by wider types, and each such step raises its version by one. Files are read
one by one with the latest schema, because readers that take a folder's schema from its first file drop new columns.
"""

import hashlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from kdlab.column_rules import Rule, check_rules
from kdlab.errors import ArgumentError, SchemaError

if TYPE_CHECKING:
    import pandas as pd

KIND_KEY, VERSION_KEY, DIGEST_KEY = "kdlab_kind", "kdlab_schema_version", "kdlab_metadata_sha256"
_OWN_KEYS = (KIND_KEY, VERSION_KEY, DIGEST_KEY, "ARROW:schema")
VERSION_COLUMN = "schema_version"


@dataclass(frozen=True)
class TableFormat:
    """The latest form of one kind of table; `version` is written in every row too, for readers without metadata."""

    kind: str
    version: int
    fields: tuple[pa.Field, ...]  # without the version column
    rules: tuple[Rule, ...] = ()  # what a file's values must be when it is read

    @property
    def schema(self) -> pa.Schema:
        """The columns of a file, the version column first."""
        return pa.schema([pa.field(VERSION_COLUMN, pa.int32(), nullable=False), *self.fields])


def write_table(
    path: str | os.PathLike[str],
    columns: Mapping[str, pa.Array | pa.ChunkedArray],
    table_format: TableFormat,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one table as one file that is there whole or not at all; the folder is made when missing.

    Args:
        columns: every column of the format except the version, by name.
        metadata: text kept beside the table, by name.

    Raises:
        SchemaError: columns are missing, unknown, of a wrong type, or hold nulls where none may be.
    """
    path = _checked_path(path)
    schema = table_format.schema
    num_rows = max((len(column) for column in columns.values()), default=0)
    version = pa.array([table_format.version] * num_rows, pa.int32())
    table = _fit(pa.table({VERSION_COLUMN: version, **columns}), schema, str(path), fill=False)
    marks = {KIND_KEY: table_format.kind, VERSION_KEY: str(table_format.version), DIGEST_KEY: _digest(metadata or {})}
    _write_whole(table.replace_schema_metadata({**(metadata or {}), **marks}), path)


def read_table(path: str | os.PathLike[str], table_format: TableFormat) -> tuple[pa.Table, dict[str, str]]:
    """Read a file in the latest form: columns that its version did not have yet are null.

    Returns:
        The table with `table_format.schema`, and the text kept beside it.

    Raises:
        SchemaError: no kdlab table, another kind, a version newer than this kdlab knows, missing columns, or a value
            that breaks a rule of the format.
        FileNotFoundError: there is no such file.
    """
    path = _checked_path(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"no result file at {path}")
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # damaged bytes raise any of them
        raise SchemaError(f"{path}: not a readable Parquet file ({error})") from error
    is_older = _checked_version(path, metadata, table_format) < table_format.version
    fitted = _fit(table.replace_schema_metadata(None), table_format.schema, str(path), fill=is_older)
    kept = {key: value for key, value in metadata.items() if key not in _OWN_KEYS}
    # Parquet's checksums cover the columns, not the text beside them; files before the digest have none.
    if metadata.get(DIGEST_KEY, _digest(kept)) != _digest(kept):
        raise SchemaError(f"{path}: the text beside the table is not what was written: its digest differs")
    check_rules(fitted, table_format.rules, str(path))
    return fitted, kept


def table_kind(path: str | os.PathLike[str]) -> str | None:
    """Return the kind of a kdlab table, None of another Parquet file.

    Raises:
        SchemaError: the file is damaged.
    """
    try:
        kind = (pq.read_schema(path).metadata or {}).get(KIND_KEY.encode())
        return None if kind is None else kind.decode()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"{os.fspath(path)}: not a readable Parquet file ({error})") from error


def table_of(frame: "pd.DataFrame", table_format: TableFormat) -> pa.Table:
    """Return a frame as a table of the format, without the version column.

    Args:
        frame: every column of the format; the version may be among them.
        table_format: what the columns are.

    Raises:
        SchemaError: a column is missing, unknown, of a wrong type, or empty where it may not be.
    """
    columns, kind = {}, table_format.kind
    for field in table_format.fields:
        if field.name not in frame.columns:
            raise SchemaError(f"{kind}: no column {field.name!r}")
        try:
            columns[field.name] = pa.array(frame[field.name], field.type, from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise SchemaError(f"{kind}: column {field.name!r}: expected {field.type} ({error})") from error
        if not field.nullable and (nulls := columns[field.name].null_count):
            raise SchemaError(f"{kind}: column {field.name!r} holds {nulls} nulls, expected none")
    unknown = set(frame.columns) - {VERSION_COLUMN} - set(columns)
    if unknown:
        raise SchemaError(f"{kind}: unknown columns {sorted(unknown)}")
    return pa.table(columns)


def with_version(table: pa.Table, table_format: TableFormat) -> pa.Table:
    """Return a table with the version column of its format in front, as `read_table` gives it."""
    versions = pa.array([table_format.version] * table.num_rows, pa.int32())
    return table.add_column(0, VERSION_COLUMN, versions)


def _digest(metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(metadata.items())).encode()).hexdigest()


def _checked_path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError("path", "a path", repr(path))
    return Path(path)


def _checked_version(path: Path, metadata: Mapping[str, str], table_format: TableFormat) -> int:
    """Return the version of a file of the format's kind that this kdlab reads."""
    kind, version = metadata.get(KIND_KEY), metadata.get(VERSION_KEY)
    if kind is None or version is None:
        raise SchemaError(f"{path}: not a kdlab table (no {KIND_KEY} or {VERSION_KEY} in its metadata)")
    if kind != table_format.kind:
        raise SchemaError(f"{path}: expected a table of kind {table_format.kind!r}, got {kind!r}")
    if not re.fullmatch("[1-9][0-9]{0,8}", version):
        raise SchemaError(f"{path}: schema version {version!r} is not a positive number")
    if int(version) > table_format.version:
        raise SchemaError(
            f"{path}: schema version {version} of {kind!r} is newer than {table_format.version}, the latest that this"
            " kdlab reads; update kdlab"
        )
    return int(version)


def _fit(table: pa.Table, schema: pa.Schema, path: str, *, fill: bool) -> pa.Table:
    """Return `table` with exactly the columns and types of `schema`; `fill` puts nulls for missing nullable columns."""
    names = table.column_names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SchemaError(f"{path}: columns {twice} are there more than once")
    unknown = [name for name in names if name not in schema.names]
    missing = [f.name for f in schema if f.name not in names and not (fill and f.nullable)]
    if unknown or missing:
        raise SchemaError(f"{path}: unknown columns {unknown}, missing columns {missing}")
    columns = [_fit_column(table, field, path) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _fit_column(table: pa.Table, field: pa.Field, path: str) -> pa.ChunkedArray:
    if field.name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    column = table[field.name]
    if column.null_count and not field.nullable:
        raise SchemaError(f"{path}: column {field.name!r} holds {column.null_count} nulls, expected none")
    try:
        return column if column.type == field.type else column.cast(field.type)
    except pa.ArrowException as error:
        raise SchemaError(f"{path}: column {field.name!r}: expected {field.type}, got {column.type}") from error


def _write_whole(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        with unfinished.open("xb") as file:
            pq.write_table(table, file, compression="zstd", write_page_checksum=True)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
