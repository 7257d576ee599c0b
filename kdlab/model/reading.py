"""Fills a model from a checkpoint: every header is checked first, then each part's bytes are read, some at a time."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kdlab.config import INT4_GROUP
from kdlab.errors import CheckpointError
from kdlab.kernels.int4 import VALUES_PER_WORD, dequantize_int4
from kdlab.model.checkpoint import Checkpoint
from kdlab.model.layers import Loadable, Part

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# compressed-tensors writes int64 of late; Kimi K2.6 holds int32.
_SHAPE_DTYPES = (torch.int32, torch.int64)
_BIAS = "e_score_correction_bias"
_CHUNK_BYTES = 32 << 20
_FAULT_BYTES = 64 << 10  # what Linux maps around a few bytes that are read
_REPORT_BYTES = 256 << 20
_BATCH_VALUES = 1 << 18


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """How far the reading of one checkpoint has come."""

    what: str  # the directory
    done_bytes: int
    total_bytes: int  # of this rank's parts, as stored
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Rate so far."""
        return self.done_bytes / max(self.seconds, 1e-9)


Progress = Callable[[ReadProgress], None]


class Readable(Loadable, Protocol):
    """A module that says which parts of a checkpoint it holds."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the weights."""

    def eval(self) -> Any:
        """Leave training mode."""


Model = TypeVar("Model", bound=Readable)


@dataclass(frozen=True, eq=False)
class Planned(Generic[Model]):
    """A model whose checkpoint has been checked, and whose weights take no memory yet.

    Attributes:
        new: makes the modules on a device.
        checkpoint: where the tensors are.
        names: name of a tensor as the model knows it -> its name in the checkpoint.
        int4: the routed experts lie there as INT4 words, scales and shapes.
        empty: the modules without memory, on torch's `meta` device.
    """

    new: Callable[[torch.device | str], Model]
    checkpoint: Checkpoint
    names: Mapping[str, str]
    int4: bool
    empty: Model

    @classmethod
    def check(
        cls,
        new: Callable[[torch.device | str], Model],
        checkpoint: Checkpoint,
        names: Mapping[str, str],
        *,
        int4: bool = False,
    ) -> "Planned[Model]":
        """Check names, shapes and dtypes of every tensor by the headers, and the weight_shapes of this rank's experts.

        Raises:
            CheckpointError: tensors are missing, unknown, or of a wrong shape or dtype, or a `weight_shape` says
                another shape than the words have.
        """
        empty = new("meta")
        check_parts(empty.views(), checkpoint, names, int4=int4)
        return cls(new, checkpoint, names, int4, empty)

    @property
    def nbytes(self) -> int:
        """What the weights will take."""
        return sum(weight.nbytes for weight in self.empty.parameters())

    def read(self, device: torch.device | str, progress: Progress | None = None) -> Model:
        """Make the modules on `device` and fill them."""
        model = self.new(device)
        read_parts(model.views(), self.checkpoint, self.names, int4=self.int4, progress=progress)
        model.eval()
        return model


class _Wanted(NamedTuple):
    """One stored tensor that a part is read from."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


def stored_names(parts: Mapping[str, Part], *, int4: bool = False) -> set[str]:
    """Return the names of all tensors that the parts are read from."""
    return {want.name for name, part in parts.items() for want in _wanted(name, part, int4)}


def check_parts(
    parts: Mapping[str, Part], checkpoint: Checkpoint, names: Mapping[str, str], *, int4: bool = False
) -> None:
    """Compare what the parts ask for with what is stored; see `Planned.check`."""
    jobs = [(part, _wanted(name, part, int4)) for name, part in parts.items()]
    wanted = [want for _, wants in jobs for want in wants]
    checkpoint.check_names((want.name for want in wanted), names)
    for want in wanted:
        stored = checkpoint.stored(names[want.name])
        if stored.shape != want.shape:
            where = checkpoint.where(names[want.name])
            raise CheckpointError(f"{where}: expected shape {list(want.shape)}, got {list(stored.shape)}")
        if stored.dtype not in want.dtypes:
            expected = " or ".join(map(str, want.dtypes))
            raise CheckpointError(
                f"{checkpoint.where(names[want.name])}: expected dtype {expected}, got {stored.dtype}"
            )
    for part, wants in sorted(jobs, key=lambda job: checkpoint.order(names[job[1][-1].name])):
        if len(wants) > 1 and part.view.numel():
            _check_weight_shape(part, wants, checkpoint, names)


def _check_weight_shape(part: Part, wanted: list[_Wanted], checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
    rows, columns = part.shape
    expected = [rows, columns if len(wanted) == 3 else columns * VALUES_PER_WORD]
    stored = names[wanted[-1].name]
    got = checkpoint.read(stored).tolist()
    checkpoint.touched(stored, _FAULT_BYTES)
    if got != expected:
        raise CheckpointError(f"{checkpoint.where(stored)}: expected the integers {expected}, got {got}")


def read_parts(
    parts: Mapping[str, Part],
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    *,
    int4: bool = False,
    progress: Progress | None = None,
) -> None:
    """Fill parts that `check_parts` has passed; a part's bytes go straight to its device, in the order of the files."""
    reader = _Reader(checkpoint, names, progress)
    jobs = [(part, _wanted(name, part, int4)) for name, part in parts.items() if part.view.numel()]
    jobs.sort(key=lambda job: checkpoint.order(names[job[1][0].name]))
    reader.total = sum(reader.size(part, wanted) for part, wanted in jobs)
    checkpoint.in_order()
    with torch.no_grad(), _one_thread():
        for part, wanted in jobs:
            if len(wanted) == 3:
                reader.dequantize(part, wanted)
            else:
                reader.copy(part, wanted[0].name)
            reader.report(reader.size(part, wanted))
        reader.flush()
    reader.report(0, last=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: gathering a slice takes microseconds, and ranks share the host's cores.

    Measured on an H200's host, 0.41 GiB of a rank's slices of K2.6: 0.15 s with one thread, 0.47 with 4, 2.1 with 16.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Reader:
    """Reads parts and counts their bytes."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str], progress: Progress | None) -> None:
        self.checkpoint, self.names, self.progress = checkpoint, names, progress
        self.total = self.done = self.reported = 0
        self.started = time.monotonic()
        self.waiting: list[tuple[Part, Tensor, Tensor]] = []  # parts to be dequantised, with their words and scales

    def size(self, part: Part, wanted: list[_Wanted]) -> int:
        """Return the bytes of the part as stored; the eight of a weight_shape are not counted."""
        if len(wanted) < 3:
            return part.view.numel() * self.checkpoint.stored(self.names[wanted[0].name]).dtype.itemsize
        scale = self.checkpoint.stored(self.names[wanted[1].name]).dtype.itemsize
        return part.view.numel() // 2 + part.view.numel() // INT4_GROUP * scale

    def copy(self, part: Part, name: str) -> None:
        """Copy a part in its view's dtype, some rows at a time: the pages of a row are dropped once it is copied."""
        stored, view = self.names[name], part.view
        source = self.checkpoint.read(stored, part.index)
        if source.shape != view.shape:
            raise CheckpointError(
                f"{self.checkpoint.where(stored)}: part {list(source.shape)} does not fill {list(view.shape)}"
            )
        nbytes = self.checkpoint.stored(stored).nbytes
        row_bytes = max(1, nbytes // part.shape[0])
        step = max(1, _CHUNK_BYTES // row_bytes)
        for begin in range(0, len(view), step):
            rows = slice(begin, begin + step)
            view[rows].copy_(source[rows])
            self.checkpoint.touched(stored, min(step, len(view)) * row_bytes)

    def dequantize(self, part: Part, wanted: list[_Wanted]) -> None:
        """Take up a part of plain values; small ones wait, as one call for many costs little more than for one."""
        rows, columns = part.index
        words = self._read(wanted[0].name, (rows, _divided(columns, VALUES_PER_WORD)))
        scales = self._read(wanted[1].name, (rows, _divided(columns, INT4_GROUP)))
        if self.waiting and not _alike(self.waiting[0], (part, words, scales)):
            self.flush()
        self.waiting.append((part, words, scales))
        if len(self.waiting) * part.view.numel() >= _BATCH_VALUES:
            self.flush()

    def flush(self) -> None:
        """Fill the parts that wait."""
        if not self.waiting:
            return
        parts, words, scales = zip(*self.waiting, strict=True)
        values = dequantize_int4(torch.stack(words), torch.stack(scales), parts[0].view.dtype)
        for part, value in zip(parts, values, strict=True):
            part.view.copy_(value)
        self.waiting.clear()

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        stored = self.names[name]
        self.checkpoint.touched(stored, self.checkpoint.stored(stored).nbytes)
        return self.checkpoint.read(stored, index)

    def report(self, nbytes: int, *, last: bool = False) -> None:
        """Count bytes; tell the caller now and then, and at the end."""
        self.done += nbytes
        if self.progress is not None and (last or self.done - self.reported >= _REPORT_BYTES):
            self.reported = self.done
            seconds = time.monotonic() - self.started
            self.progress(ReadProgress(str(self.checkpoint.directory), self.done, self.total, seconds))


def _alike(first: tuple[Part, Tensor, Tensor], second: tuple[Part, Tensor, Tensor]) -> bool:
    return all(
        (one.shape, one.dtype) == (other.shape, other.dtype) for one, other in zip(first[1:], second[1:], strict=True)
    )


def _divided(columns: slice, values: int) -> slice:
    """Return the slice of words or groups that hold these columns; ranks cut between groups only."""
    begin, end = columns.start, columns.stop
    return slice(None if begin is None else begin // values, None if end is None else end // values)


def _wanted(name: str, part: Part, int4: bool) -> list[_Wanted]:
    """Return the stored tensors that one part is read from, a weight_shape last."""
    dtype = part.view.dtype
    if not int4 or ".mlp.experts." not in name or name.endswith(".weight_scale"):
        if name.endswith(_BIAS):  # it decides the choice: 16 bits would have lost what it needs
            return [_Wanted(name, part.shape, (torch.float32, torch.float64))]
        exact = name.endswith(".weight_scale") or not dtype.is_floating_point
        return [_Wanted(name, part.shape, (dtype,) if exact else _FLOATS)]
    stem = name.removesuffix("_packed")
    shape = _Wanted(stem + "_shape", (2,), _SHAPE_DTYPES)
    if name.endswith(".weight_packed"):
        return [_Wanted(name, part.shape, (dtype,)), shape]
    rows, columns = part.shape
    words = _Wanted(stem + "_packed", (rows, columns // VALUES_PER_WORD), (torch.int32,))
    return [words, _Wanted(stem + "_scale", (rows, columns // INT4_GROUP), _FLOATS), shape]
