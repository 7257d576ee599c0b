"""Compiled kernels on disk: `<key>.cubin`, and `<key>.json` with its hash and what each kernel uses of the GPU.

Files appear whole (written beside, then renamed) and nothing is ever locked, so a process that is killed at any point
leaves at most a stray temporary file, and two processes that write the same entry both end well. An entry whose parts
do not fit together is no entry: it is compiled again.
"""

import hashlib
import json
import os
import re
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kdlab.errors import BuildError

MAX_ENTRIES = 2000
"""Some 100 MB to 200 MB."""
_TEMPORARY = ".unfinished-"
_STRAY_S = 3600.0
_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame")
_SPILL = re.compile(r"(\d+) bytes spill (?:stores|loads)")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel uses, as ptxas reports it."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    """Static shared memory of a block; dynamic comes on top."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one build for one architecture."""

    content: bytes
    kernels: dict[str, Resources]
    log: str


def parse_resources(log: str) -> dict[str, Resources]:
    """Read what `ptxas -v` prints of each `__global__` function."""
    found = {}
    parts = _ENTRY.split(log)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        stack, used, shared = _STACK.search(text), _USED.search(text), _SHARED.search(text)
        if stack and used:
            spill_bytes = sum(map(int, _SPILL.findall(text)))  # of functions that were not inlined as well
            found[name] = Resources(int(used[1]), int(stack[1]), spill_bytes, int(shared[1]) if shared else 0)
    return found


def load_cubin(folder: Path, key: str) -> Cubin | None:
    """Return the entry `key`, or None when there is none or it is damaged."""
    try:
        content = (folder / f"{key}.cubin").read_bytes()
        facts = json.loads((folder / f"{key}.json").read_bytes())
        if facts["sha256"] != hashlib.sha256(content).hexdigest():
            return None
        kernels = {name: Resources(**uses) for name, uses in facts["kernels"].items()}
        return Cubin(content, kernels, facts["log"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def store_cubin(folder: Path, key: str, cubin: Cubin, what: str) -> None:
    """Write the entry `key`.

    Args:
        what: the build in words, for people who look into the folder.

    Raises:
        BuildError: the folder cannot be written.
    """
    facts = {
        "build": what,
        "sha256": hashlib.sha256(cubin.content).hexdigest(),
        "kernels": {name: asdict(uses) for name, uses in cubin.kernels.items()},
        "log": cubin.log,
    }
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(folder / f"{key}.cubin", cubin.content)
        _write(folder / f"{key}.json", json.dumps(facts, indent=1).encode())
        _prune(folder)
    except OSError as error:
        raise BuildError(
            f"compiled kernels cannot be kept in {folder} ({error.strerror or error}): make that folder writable, or "
            "name another one in the environment variable KDLAB_CACHE"
        ) from error


def _prune(folder: Path) -> None:
    """Remove the oldest entries over the limit, and what killed processes left."""
    now = time.time()
    ages = {path: now - status.st_mtime for path in folder.iterdir() if (status := _status(path))}
    oldest_last = sorted((path for path in ages if path.suffix == ".cubin"), key=ages.__getitem__)
    for path in oldest_last[MAX_ENTRIES:]:
        path.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
    for path, age in ages.items():
        if path.name.startswith(_TEMPORARY) and age > _STRAY_S:
            path.unlink(missing_ok=True)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # another process removed it just now
        return None


def _write(path: Path, content: bytes) -> None:
    number, name = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
