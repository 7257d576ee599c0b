"""A Hugging Face directory of safetensors: which tensors it holds, where their bytes lie, and a digest of them all."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from torch import Tensor

from kdlab.errors import CheckpointError
from kdlab.model.shard import Shard, Stored, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FULL_DIGEST_BYTES = 1 << 30
"""Up to this size of all files every byte is in the digest."""
SAMPLED = "sampled:"
"""What the digest of a larger checkpoint begins with."""
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_SHOWN = 20
_CHUNK = 1 << 20
_LAYER = re.compile(r".*?layers\.\d+\.")


class Checkpoint:
    """Open files of one directory, closed by `with`.

    Attributes:
        names: every tensor, in the order of the files.
    """

    def __init__(self, directory: str | Path) -> None:
        """Open `model.safetensors`, or the shards of `model.safetensors.index.json`, and check every header.

        Raises:
            CheckpointError: no such file, a shard that is missing or cut short, or an index that disagrees with it.
        """
        self.directory = Path(directory)
        files, index = _files(self.directory)
        _check_files(self.directory, files, index or {})
        self._shards = [Shard(self.directory / name) for name in files]
        self._reading: Shard | None = None
        self._shard_of = {name: (i, shard) for i, shard in enumerate(self._shards) for name in shard.tensors}
        self.names = list(self._shard_of)
        if index is not None:
            _check_index(self.directory, index, {name: self._file(name) for name in self.names})

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shard_of.clear()
        self._shards.clear()
        self._reading = None

    def stored(self, name: str) -> Stored:
        """Return dtype, shape and place of a tensor."""
        return self._shard_of[name][1].tensors[name]

    def where(self, name: str) -> str:
        """Return file and name of a tensor, for messages."""
        return f"{self._shard_of[name][1].path}: {name}"

    def order(self, name: str) -> tuple[int, int]:
        """Return what sorts tensors as they lie on disk."""
        number, shard = self._shard_of[name]
        return number, shard.tensors[name].offset

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return tensor[index] on the CPU, as stored: a view into the file, which must be copied to be kept."""
        return self._shard_of[name][1].read(name, index)

    def in_order(self) -> None:
        """Say that tensors will now be read in the order of the files."""
        for shard in self._shards:
            shard.in_order()

    def touched(self, name: str, nbytes: int) -> None:
        """Say that so many bytes of the tensor were copied, so that memory behind them may be given back."""
        shard = self._shard_of[name][1]
        if self._reading is not None and self._reading is not shard:
            self._reading.drop()
        self._reading = shard
        shard.touched(nbytes)

    def check_names(self, expected: Iterable[str], names: Mapping[str, str]) -> None:
        """Raise CheckpointError that lists the tensors that are missing and the ones that nobody asked for.

        Args:
            expected: names that are needed.
            names: names that are there, as the model knows them -> as the checkpoint does.
        """
        wanted, present = set(expected), names.keys()
        missing, unknown = sorted(wanted - present), present - wanted
        lines = []
        if missing:
            hints = [self._hint(name, names) for name in missing[:_SHOWN]]
            lines.append(f"missing tensors: {_listing(hints + missing[_SHOWN:])}")
        if unknown:
            places = (f"{names[name]} in {self._file(names[name])}" for name in unknown)
            lines.append(f"unknown tensors: {_listing(places)}")
        if lines:
            raise CheckpointError(f"{self.directory}: " + "; ".join(lines))

    def _file(self, name: str) -> str:
        return self._shard_of[name][1].path.name

    def _hint(self, name: str, names: Mapping[str, str]) -> str:
        """Return a missing name with the shard that holds others of its layer, or others that belong to none."""
        layer = _layer(name)
        same = next((other for other in names if _layer(other) == layer), None)
        if same is None:
            return name
        others = "of its layer" if layer else "outside the layers"
        return f"{name} (others {others} are in {self._file(names[same])})"


def _layer(name: str) -> str:
    """Return a name up to its layer's number, or nothing where it has none."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def checkpoint_sha256(directory: str | Path) -> str:
    """Return a sha256 over name, size and bytes of config.json and the safetensors files, sorted by name.

    Of files above FULL_DIGEST_BYTES in all, which would take an hour at 554 GiB, the digest holds config, index, the
    whole header of every file, and 16 blocks of 4 KiB spread evenly over its tensors; it then begins with `sampled:`.
    So it tells checkpoints apart, and does not prove that every byte is the same.

    Raises:
        CheckpointError: no config.json, or no safetensors file.
    """
    folder = Path(directory)
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    if len(files) == 1 or not files[0].is_file():
        raise CheckpointError(f"{folder}: expected config.json and safetensors files, got {_contents(folder)}")
    digest = hashlib.sha256()
    sampled = sum(path.stat().st_size for path in files) > FULL_DIGEST_BYTES
    if sampled and (folder / INDEX).is_file():
        files.insert(1, folder / INDEX)
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        blocks = _sampled_blocks(path) if sampled and path.suffix == ".safetensors" else [(0, path.stat().st_size)]
        with path.open("rb") as file:
            for begin, length in blocks:
                file.seek(begin)
                while length and (chunk := file.read(min(_CHUNK, length))):
                    digest.update(chunk)
                    length -= len(chunk)
    return (SAMPLED if sampled else "") + digest.hexdigest()


def _sampled_blocks(path: Path) -> list[tuple[int, int]]:
    """Return (offset, length) of the header and of blocks spread over the tensors' bytes, the last ones among them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = min(size, 8 + int.from_bytes(file.read(8), "little"))
    steps = range(_SAMPLES)
    last = max(begin, size - _SAMPLE_BYTES)
    return [(0, begin), *((begin + (last - begin) * i // (_SAMPLES - 1), _SAMPLE_BYTES) for i in steps)]


def weight_map(directory: Path) -> dict[str, str]:
    """Return the index: tensor name -> file name.

    Raises:
        CheckpointError: the index cannot be read, or names files elsewhere.
    """
    path = directory / INDEX
    try:
        found = read_json(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a JSON object with weight_map, got {error!r}") from error
    files = set(found.values()) if isinstance(found, dict) and all(isinstance(x, str) for x in found.values()) else {""}
    if any(not name or Path(name).name != name for name in files):
        raise CheckpointError(f"{path}: weight_map: expected tensor names to file names of the same directory")
    return found


def _files(directory: Path) -> tuple[list[str], dict[str, str] | None]:
    """Return the names of the files, and the index where there is one."""
    single, index = (directory / SINGLE).is_file(), (directory / INDEX).is_file()
    if single and index:
        raise CheckpointError(f"{directory}: expected {SINGLE} or {INDEX}, got both")
    if single:
        return [SINGLE], None
    if index:
        found = weight_map(directory)
        return sorted(set(found.values())), found
    raise CheckpointError(f"{directory}: expected {SINGLE} or {INDEX} (only safetensors), got {_contents(directory)}")


def _check_files(directory: Path, files: list[str], index: dict[str, str]) -> None:
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        tensor = min(name for name, file in index.items() if file == missing[0])
        paths = _listing(str(directory / name) for name in missing)
        raise CheckpointError(f"{paths}: expected a shard that {INDEX} names for {tensor}, got no such file")


def _check_index(directory: Path, index: dict[str, str], file_of: dict[str, str]) -> None:
    wrong = [name for name in index.keys() | file_of.keys() if index.get(name) != file_of.get(name)]
    if wrong:
        places = (
            f"{name} (index: {index.get(name, 'nowhere')}; found: {file_of.get(name, 'nowhere')})" for name in wrong
        )
        raise CheckpointError(f"{directory / INDEX}: index and shards disagree on: {_listing(places)}")


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


def _contents(directory: Path) -> str:
    if not directory.is_dir():
        return "no such directory"
    return _listing(path.name for path in directory.iterdir()) or "an empty directory"
