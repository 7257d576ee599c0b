"""One safetensors file: its header checked to the last byte, its tensors read through a memory map.

The format (safetensors): eight bytes of header length, a JSON object name -> dtype, shape, data_offsets, the bytes.
"""

import json
import math
import mmap
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdlab.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_SIZES = {name: dtype.itemsize for name, dtype in _DTYPES.items()}
_LENGTH = 8
_MAX_HEADER = 100_000_000  # the format's own limit
# Pages read through a memory map stay resident until they are given back: this many bytes at most.
RESIDENT_BYTES = 64 << 20


class Stored(NamedTuple):
    """Where one tensor lies: dtype, shape, and the offset of its bytes in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Shard:
    """An open file. Tensors are views into the map: copy what is to be kept, then `touched` may drop the pages.

    Attributes:
        path: of the file.
        tensors: name -> where it lies, in the order of the header.
        header: the header's bytes.
        nbytes: size of the file.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            CheckpointError: the file is missing, cut short or no safetensors, or a tensor's entry contradicts itself;
                the message names file and tensor.
        """
        self.path = path
        self._resident = 0
        try:
            with path.open("rb") as file:
                self.nbytes = path.stat().st_size
                self.header = _read_header(path, file, self.nbytes)
                # A private map: torch wants writable memory, and nothing that is written here reaches the file.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                self._map.madvise(mmap.MADV_RANDOM)  # weight_shapes: eight bytes every few MB, nothing ahead of them
        except OSError as error:
            raise _broken(path, error) from error
        self.tensors = _parse(path, self.header, self.nbytes)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return tensor[index] on the CPU, as stored: a view into the file."""
        dtype, shape, offset, nbytes = self.tensors[name]
        if not nbytes:
            return torch.empty(shape, dtype=dtype)[index]
        flat = torch.frombuffer(self._map, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)
        return flat.view(shape)[index] if index else flat.view(shape)

    def in_order(self) -> None:
        """Say that tensors will now be read as they lie in the file, so that the system may read ahead."""
        self._map.madvise(mmap.MADV_SEQUENTIAL)

    def touched(self, nbytes: int) -> None:
        """Count bytes that were read and copied; from time to time the pages behind them are given back."""
        self._resident += nbytes
        if self._resident >= RESIDENT_BYTES:
            self.drop()

    def drop(self) -> None:
        """Give back the pages that were read: those of many files would add up."""
        self._map.madvise(mmap.MADV_DONTNEED)
        self._resident = 0


def read_json(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises:
        ValueError: it is no JSON, or an object has a key twice, of which json itself would drop the first.
    """
    return json.loads(text, object_pairs_hook=_each_key_once)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{twice} more than once")
    return found


def _read_header(path: Path, file: Any, nbytes: int) -> bytes:
    length = int.from_bytes(file.read(_LENGTH), "little")
    if nbytes < _LENGTH or not 2 <= length <= min(_MAX_HEADER, nbytes - _LENGTH):
        raise _broken(path, f"{nbytes} bytes with a header of {length if nbytes >= _LENGTH else 'unknown length'}")
    return bytes(file.read(length))


def _parse(path: Path, header: bytes, nbytes: int) -> dict[str, Stored]:
    try:
        entries = read_json(header)
    except (ValueError, RecursionError) as error:
        raise _broken(path, error) from error
    if not isinstance(entries, dict):
        raise _broken(path, "a header that is no JSON object")
    entries.pop("__metadata__", None)
    begin = _LENGTH + len(header)
    tensors = {name: _entry(path, name, entry, begin) for name, entry in entries.items()}
    for name, stored in tensors.items():
        if (end := stored.offset + stored.nbytes) > nbytes:
            raise _broken(path, f"{nbytes} bytes, and {name} ends at {end}: the file is cut short")
    end = begin
    # In file order no byte is left out or used twice, as the format demands: so no offset points elsewhere.
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].offset):
        if stored.offset != end:
            raise CheckpointError(f"{path}: {name}: expected its bytes to begin at {end}, got {stored.offset}")
        end += stored.nbytes
    if end != nbytes:
        raise _broken(path, f"{nbytes} bytes where its tensors end at {end}")
    return tensors


def _entry(path: Path, name: str, entry: Any, begin: int) -> Stored:
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        size = math.prod(shape) * _SIZES[dtype]
        numbers = (*shape, first, last)
        whole = {type(number) for number in numbers} == {int} and min(numbers) >= 0
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {name}: expected dtype, shape and data_offsets, got {entry!r}") from error
    if not whole or last - first != size:
        raise CheckpointError(f"{path}: {name}: expected {size} bytes of {dtype} {list(shape)}, got {[first, last]}")
    return Stored(_DTYPES[dtype], shape, begin + first, size)


def _broken(path: Path, what: object) -> CheckpointError:
    return CheckpointError(f"{path}: expected a whole safetensors file, got {what}")
