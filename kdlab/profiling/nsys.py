"""Nsight Systems exports from elsewhere: `nsys export --type sqlite` of a run with `--nvtx`, read into launches.

NVIDIA says that the tables may change, and leaves out those without rows. So tables are found by how their names begin,
and columns are looked for before they are read; what does not fit is an error that names it. A launch belongs to the
ranges that were open on its thread when the host called for it.
"""

import os
import re
import sqlite3
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd

from kdlab.errors import SchemaError
from kdlab.profiling.launches import PREFILL, launches_frame
from kdlab.profiling.ranges import DOMAIN, ROUND, Range, open_ranges, place_of
from kdlab.profiling.work import kernel_name

SOURCE = "nsys"
_KNOWN_MAJOR = "3"
_KERNEL, _CALLS, _RANGES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_OTHER_WORK = {
    "CUPTI_ACTIVITY_KIND_MEMCPY": "Memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "Memset",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "CUDA graph",
}
"""What is no kernel and has no name; a graph is one row where nsys traced it as a whole."""
_PUSHED, _STARTED, _DOMAIN_MADE = 59, 60, 75  # NVTX_EVENTS.eventType
_REPEAT = "repeat "

Record = dict[str, Any]


def read_nsys(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read the launches of a SQLite export of Nsight Systems.

    Args:
        path: the file; it is not written to.

    Returns:
        The columns of `load_nsight`. `case` is the file's name with "round", "prefill" or "outside of rounds" (and the
        GPU where there are several); `repeat` counts the rounds. Sizes are empty: the file does not know them.

    Raises:
        FileNotFoundError: there is no such file.
        SchemaError: it is no SQLite file, or lacks a table or column.

    Warns where there is no range of ours, so that no launch has a stage, and where the tables' version is unknown.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no export at {path}")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            return _Export(connection, path).launches()
    except sqlite3.DatabaseError as error:
        raise SchemaError(f"{path}: not a readable SQLite export of Nsight Systems ({error})") from error


class _Export:
    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection, self.path = connection, path
        self.tables = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]

    def launches(self) -> pd.DataFrame:
        """Every kernel, copy, fill and traced graph, in the order of their starts."""
        version = self._version()
        work = sorted(self._work(), key=lambda record: record["start"])
        ranges = self._our_ranges()
        if not ranges:
            warnings.warn(f"{self.path.name}: no NVTX range of the domain {DOMAIN!r}: no stages", stacklevel=4)
        calls = {(call["globalTid"] >> 24, call["correlationId"]): call
                 for call in self._read(_CALLS, ["start", "globalTid", "correlationId"])}  # fmt: skip
        moments = []
        for record in work:
            call = calls.get((record["globalPid"] >> 24, record["correlationId"]))
            moments.append((None, 0.0) if call is None else (call["globalTid"], float(call["start"])))
        stacks = open_ranges(_with_repeats(ranges), moments)
        several = len({record["deviceId"] for record in work}) > 1
        rows = [_row(record, stack, self._case(record, stack, several))
                for record, stack in zip(work, stacks, strict=True)]  # fmt: skip
        facts = {"nsys_schema": version, "file": self.path.name, "gpu": self._gpu()}
        return launches_frame(_from_their_first(rows), facts)

    def _work(self) -> Iterator[Record]:
        shared = ["start", "end", "correlationId", "globalPid", "deviceId"]
        shape = ["gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread", "graphNodeId"]
        if not self._named(_KERNEL) and not self._named("CUPTI_ACTIVITY_KIND_GRAPH_TRACE"):
            raise SchemaError(f"{self.path}: no table {_KERNEL}*: it holds no kernel")
        names = dict(self._pairs("StringIds", "id", "value"))
        for record in self._read(_KERNEL, [*shared, "demangledName"], shape):
            yield record | {"kernel": kernel_name(str(names.get(record["demangledName"], record["demangledName"])))}
        for table, name in _OTHER_WORK.items():
            for record in self._read(table, shared, ["graphNodeId"]):
                yield record | {"kernel": name}

    def _our_ranges(self) -> list[Range]:
        if not self._named(_RANGES):
            return []
        texts = dict(self._pairs("StringIds", "id", "value"))
        events = list(self._read(_RANGES, ["start", "eventType", "domainId"], ["end", "globalTid", "text", "textId"]))
        for event in events:
            event["text"] = event.get("text") or texts.get(event.get("textId"))
        ours = {event["domainId"] for event in events if event["eventType"] == _DOMAIN_MADE and event["text"] == DOMAIN}
        return [Range(event["globalTid"], event["start"], event["end"], event["text"]) for event in events
                if event["eventType"] in (_PUSHED, _STARTED) and event["domainId"] in ours
                and event["end"] is not None and event["text"]]  # fmt: skip

    def _case(self, record: Record, stack: Sequence[str], several: bool) -> str:
        where = next((span for span in (PREFILL, ROUND) if span in stack), "outside of rounds")
        return f"{self.path.name}, {where}" + (f", GPU {record['deviceId']}" if several else "")

    def _version(self) -> str | None:
        found = dict(self._pairs("META_DATA_EXPORT", "name", "value", needed=False)).get("EXPORT_SCHEMA_VERSION")
        if found is None or str(found).partition(".")[0] != _KNOWN_MAJOR:
            words = f"tables of version {found or 'unknown'}, read as those of version {_KNOWN_MAJOR}"
            warnings.warn(f"{self.path.name}: {words}", stacklevel=5)
        return None if found is None else str(found)

    def _gpu(self) -> str | None:
        names = {name for name, _ in self._pairs("TARGET_INFO_GPU", "name", "id", needed=False)}
        return " + ".join(sorted(map(str, names))) or None

    def _named(self, beginning: str) -> list[str]:
        """Tables of a name, or of the name with a suffix as newer exports give it."""
        return [name for name in self.tables if re.fullmatch(rf"{beginning}(_.+|V?\d+)?", name, re.IGNORECASE)]

    def _pairs(self, beginning: str, key: str, value: str, *, needed: bool = True) -> list[tuple[Any, Any]]:
        if needed and not self._named(beginning):
            raise SchemaError(f"{self.path}: no table {beginning}*")
        return [(record[key], record[value]) for record in self._read(beginning, [key, value])]

    def _read(self, beginning: str, needed: Sequence[str], able: Sequence[str] = ()) -> Iterator[Record]:
        """The rows of the tables of a name; columns of `able` are left out where a table lacks them."""
        for table in self._named(beginning):
            there = [column[1] for column in self.connection.execute(f'pragma table_info("{table}")')]
            for name in needed:
                if name not in there:
                    raise SchemaError(f"{self.path}: table {table} has no column {name!r}")
            names = [*needed, *(name for name in able if name in there)]
            columns = ", ".join(f'"{name}"' for name in names)
            for values in self.connection.execute(f'select {columns} from "{table}"'):
                yield dict(zip(names, values, strict=True))


def _with_repeats(ranges: Sequence[Range]) -> list[Range]:
    """Put a range with a number around every round and prefill, so that launches know which one it was."""
    spans = sorted((found for found in ranges if found.name in (ROUND, PREFILL)), key=lambda found: found.start)
    counts = {ROUND: 0, PREFILL: 0}
    numbered = []
    for found in spans:
        numbered.append(Range(found.thread, found.start, found.end, f"{_REPEAT}{counts[found.name]}"))
        counts[found.name] += 1
    return [*numbered, *ranges]


def _row(record: Record, stack: Sequence[str], case: str) -> Record:
    repeats = [name for name in stack if name.startswith(_REPEAT)]
    sides = [[record.get(f"{side}{axis}") for axis in "XYZ"] for side in ("grid", "block")]
    grid, block = (None if None in side else ", ".join(map(str, side)) for side in sides)
    return place_of([name for name in stack if not name.startswith(_REPEAT)]) | {
        "source": SOURCE, "subject": "round", "case": case, "simulated": False,
        "mode": "graph" if record.get("graphNodeId") or record["kernel"] == "CUDA graph" else "eager",
        "repeat": int(repeats[-1].removeprefix(_REPEAT)) if repeats else 0,
        "kernel": record["kernel"], "start_us": record["start"] / 1e3,
        "duration_us": (record["end"] - record["start"]) / 1e3,
        "grid": grid, "block": block, "registers": record.get("registersPerThread"),
    }  # fmt: skip


def _from_their_first(rows: list[Record]) -> list[Record]:
    """Count positions and starts from the first launch of each case and repetition; rows come in order of starts."""
    firsts: dict[tuple[str, int], tuple[float, int]] = {}
    for row in rows:
        key = row["case"], row["repeat"]
        start, position = firsts.get(key, (row["start_us"], 0))
        firsts[key] = start, position + 1
        row |= {"start_us": row["start_us"] - start, "position": position}
    return rows
