"""What a build depends on among the files of `csrc/`: one `.cu` and every file that it includes by a quoted name."""

import hashlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from kdlab.errors import BuildError

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
# File systems keep times in steps of some milliseconds: a file that changed this short a time ago may change again and
# keep its time stamp.
_SETTLED_NS = 50_000_000

Stamp = tuple[tuple[int, int], ...]
"""Modification time in nanoseconds and size of each file."""


@dataclass(frozen=True, slots=True)
class Source:
    """A `.cu` and its quoted includes as they were at one moment."""

    files: tuple[Path, ...]
    stamp: Stamp | None
    """None when a file changed so short a time ago that an equal stamp would prove nothing."""
    digest: str
    """Of names and bytes, not of folders: two clones with the same text have the same digest."""

    def is_current(self) -> bool:
        """Say whether the files still are what was read: costs one `os.stat` a file."""
        try:
            return self.stamp is not None and stamp_of(self.files) == self.stamp
        except OSError:
            return False


def stamp_of(files: tuple[Path, ...]) -> Stamp:
    """Return time and size of each file; raises OSError when one is gone."""
    return tuple((status.st_mtime_ns, status.st_size) for status in map(os.stat, files))


def read_source(path: Path) -> Source:
    """Read `path` and every quoted include that can be reached from it.

    An include that does not exist is left to the compiler, whose message has the line.

    Raises:
        BuildError: `path` cannot be read.
    """
    digest, files, todo = hashlib.sha256(), [], [path]
    stamps = []
    while todo:
        file = todo.pop()
        if file in files:
            continue
        try:
            status = os.stat(file)  # before reading: an edit in between then shows as another stamp
            content = file.read_bytes()
        except OSError as error:
            raise BuildError(f"{file} cannot be read: {error.strerror}") from error
        files.append(file)
        stamps.append((status.st_mtime_ns, status.st_size))
        digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
        names = (match.decode(errors="replace") for match in _INCLUDE.findall(content))
        todo += [found for name in names if (found := (file.parent / name).resolve()).is_file()]
    settled = abs(time.time_ns() - max(time_ns for time_ns, _ in stamps)) > _SETTLED_NS
    return Source(tuple(files), tuple(stamps) if settled else None, digest.hexdigest())
