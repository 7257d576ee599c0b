"""Traces as JSON lines: the columns of the Parquet form, a header line before them, and faults with their line."""

import itertools
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kdlab.errors import SchemaError
from kdlab.parquet import KIND_KEY, VERSION_KEY

Line = tuple[int, Any]  # number in the file, 1 first, and the JSON value of the line


def read_lines(path: Path, faults: list[str]) -> Iterator[Line]:
    """Yield the values of a JSON-lines file; blank lines are skipped, others that are no JSON become `faults`.

    NaN and infinities are no JSON: what is not usable is null.
    """
    with path.open("rb") as file:
        for number, content in enumerate(file, start=1):
            if not content.strip():
                continue
            try:
                value = json.loads(content.decode(), parse_constant=_refuse, object_pairs_hook=_unique)
                if b"\\u" in content:  # half of a pair, as \ud800, is JSON and no text: no file would hold it
                    json.dumps(value, ensure_ascii=False).encode()
                yield number, value
            except (ValueError, RecursionError) as error:
                faults.append(f"{path}:{number}: expected a JSON object, got {content.strip()[:60]!r} ({error})")


def read_json_lines(path: str | os.PathLike[str]) -> list[Any]:
    """Return the value of every line that is not blank.

    Raises:
        SchemaError: the first line that is no JSON, with its number.
    """
    faults: list[str] = []
    values = [value for _, value in read_lines(Path(path), faults)]
    if faults:
        raise SchemaError(faults[0])
    return values


def check_header(path: Path, line: Line | None, versions: Mapping[str, int]) -> dict[str, Any]:
    """Return the header of a trace.

    Args:
        path: named in the errors.
        line: the first line of the file, None where it has none.
        versions: the kinds of trace, and the latest version of each.

    Raises:
        SchemaError: the line is missing or no header, or its kind or version is unknown.
    """
    number, header = line or (1, None)
    where = f"{path}:{number}"
    if not isinstance(header, dict) or KIND_KEY not in header or VERSION_KEY not in header:
        raise SchemaError(f"{where}: expected a header with {KIND_KEY} and {VERSION_KEY}, got {header!r:.60}")
    kind, version = header[KIND_KEY], header[VERSION_KEY]
    if not isinstance(kind, str) or kind not in versions:
        raise SchemaError(f"{where}: {KIND_KEY}: expected one of {', '.join(versions)}, got {kind!r:.60}")
    if type(version) is not int or version < 1:
        raise SchemaError(f"{where}: {VERSION_KEY}: expected a count of at least 1, got {version!r:.60}")
    if version > versions[kind]:
        latest = f"newer than {versions[kind]}, the latest that this kdlab reads; update kdlab"
        raise SchemaError(f"{where}: {VERSION_KEY}: {version} of {kind!r} is {latest}")
    return header


def write_lines(path: Path, header: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a header and its rows: the file is there whole or not at all; its folder is made when missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            for row in itertools.chain([header], rows):
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key stands twice among {', '.join(key for key, _ in pairs)}")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON; write null")
