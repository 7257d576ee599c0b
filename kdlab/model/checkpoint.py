"""A Hugging Face directory of safetensors: which tensors it holds, and their bytes."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kdlab.errors import CheckpointError
from kdlab.model.layers import Part

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 20
_CHUNK = 1 << 20


class Checkpoint:
    """Open files of one directory, closed by `with`.

    Attributes:
        names: every tensor, in the order of the files.
    """

    def __init__(self, directory: str | Path) -> None:
        """Open `model.safetensors`, or the shards of `model.safetensors.index.json`.

        Raises:
            CheckpointError: no such file, a shard that is missing or cut short, or an index that disagrees with it.
        """
        self.directory = Path(directory)
        self._files = {name: _open(self.directory / name) for name in _file_names(self.directory)}
        self._file_of = {tensor: name for name, file in self._files.items() for tensor in file.keys()}  # noqa: SIM118
        self.names = list(self._file_of)
        _check_index(self.directory, self._file_of)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU, as stored."""
        return self._files[self._file_of[name]].get_tensor(name)


def read_into(part: Part, tensor: Tensor, name: str) -> None:
    """Write a part of a stored tensor into a weight, in the weight's dtype.

    Raises:
        CheckpointError: the shape differs, one is an integer tensor and the other is not, or the values are not a float
            of 16 bits or more.
    """
    view = part.view
    if tensor.shape != part.shape:
        raise CheckpointError(f"{name}: expected shape {list(part.shape)}, got {list(tensor.shape)}")
    known = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    allowed = known if view.dtype.is_floating_point else (view.dtype,)
    if tensor.dtype not in allowed:
        raise CheckpointError(f"{name}: expected dtype {' or '.join(map(str, allowed))}, got {tensor.dtype}")
    with torch.no_grad():
        view.copy_(tensor[part.index])


def check_names(expected: Iterable[str], found: Iterable[str], where: str | Path) -> None:
    """Raise CheckpointError that lists the tensors that are missing and the ones that nobody asked for."""
    wanted, present = set(expected), set(found)
    problems = [("missing", wanted - present), ("unknown", present - wanted)]
    lines = [f"{kind} tensors: {_listing(names)}" for kind, names in problems if names]
    if lines:
        raise CheckpointError(f"{where}: " + "; ".join(lines))


def checkpoint_sha256(directory: str | Path) -> str:
    """Return the sha256 over name, size and bytes of config.json and the safetensors files, sorted by name."""
    folder = Path(directory)
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    if len(files) == 1 or not files[0].is_file():
        raise CheckpointError(f"{folder}: expected config.json and safetensors files, got {_contents(folder)}")
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _file_names(directory: Path) -> list[str]:
    single, index = (directory / SINGLE).is_file(), (directory / INDEX).is_file()
    if single and index:
        raise CheckpointError(f"{directory}: expected {SINGLE} or {INDEX}, got both")
    if single:
        return [SINGLE]
    if index:
        return sorted(set(_weight_map(directory).values()))
    raise CheckpointError(f"{directory}: expected {SINGLE} or {INDEX} (only safetensors), got {_contents(directory)}")


def _weight_map(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a JSON object with weight_map, got {error!r}") from error
    if not isinstance(found, dict) or any(Path(str(name)).name != name for name in found.values()):
        raise CheckpointError(f"{path}: weight_map: expected tensor names to file names of the same directory")
    return found


def _check_index(directory: Path, file_of: dict[str, str]) -> None:
    if SINGLE in set(file_of.values()) or not (directory / INDEX).is_file():
        return
    index = _weight_map(directory)
    wrong = sorted(name for name in index.keys() | file_of.keys() if index.get(name) != file_of.get(name))
    if wrong:
        raise CheckpointError(f"{directory / INDEX}: index and shards disagree on: {_listing(wrong)}")


def _open(path: Path) -> safe_open:
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a shard that {INDEX} names, got no such file")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: expected a whole safetensors file, got {error}") from error


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


def _contents(directory: Path) -> str:
    if not directory.is_dir():
        return "no such directory"
    return _listing(path.name for path in directory.iterdir()) or "an empty directory"
