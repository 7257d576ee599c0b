"""What the verbs print: JSON for programs, plain tables for people, progress on standard error."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any


def print_json(value: Any) -> None:
    """Print `value` as one JSON document; what JSON cannot say (NaN, infinity) is null."""
    print(json.dumps(_to_json(value), ensure_ascii=False, indent=1, allow_nan=False))


def _to_json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of equal keys under their names, numbers to the right; a column of whole numbers has no decimals."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    whole = {name for name in names if all(_is_whole(row.get(name)) for row in rows)}
    texts = [[_cell(row.get(name), name in whole) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *texts, strict=True)]
    numeric = [all(_is_number(row.get(name)) for row in rows) for name in names]
    for line in [names, *texts]:
        cells = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _is_number(value: Any) -> bool:
    return value is None or (not isinstance(value, bool | str) and isinstance(value, int | float))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _cell(value: Any, whole: bool) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if whole and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        # Three decimals, as the notebooks' own tables have them.
        return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1e6 else f"{value:.4g}"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
    return text if text.isprintable() else repr(text)


class Progress:
    """Progress on standard error: one line that is redrawn on a terminal, now and then a new line elsewhere."""

    def __init__(self, name: str, things: str = "prompts", *, every_s: float = 5.0) -> None:
        self._name, self._things, self._every_s, self._last = name, things, every_s, -math.inf
        self._started, self._terminal = time.monotonic(), sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """Say that `done` of `total` things are done."""
        now = time.monotonic()
        if now - self._last < (0.2 if self._terminal else self._every_s) and done < total:
            return
        self._last = now
        end = "\n" if done >= total or not self._terminal else ""
        start = "\r" if self._terminal else ""
        line = f"{start}{self._name}: {done} of {total} {self._things}, {now - self._started:.0f} s"
        print(line, end=end, file=sys.stderr, flush=True)


class Reading:
    """Progress of reading weights on standard error: nothing at all of what takes less than `every_s` seconds."""

    def __init__(self, *, every_s: float = 2.0) -> None:
        self._every_s = self._next_s = every_s

    def __call__(self, report: Any) -> None:
        """Say how far a `ReadProgress` is."""
        ended, spoken = report.done_bytes >= report.total_bytes, self._next_s > self._every_s
        if report.seconds < self._next_s and not (ended and spoken):
            return
        self._next_s = self._every_s + (0.0 if ended else report.seconds)  # the next checkpoint begins at 0 s
        done, total = (f"{nbytes / 2**30:.2f}" for nbytes in (report.done_bytes, report.total_bytes))
        say(f"reading {report.what}: {done} of {total} GiB, {report.bytes_per_s / 1e9:.2f} GB/s")


def say(line: str) -> None:
    """Print one line of progress on standard error."""
    print(line, file=sys.stderr, flush=True)
