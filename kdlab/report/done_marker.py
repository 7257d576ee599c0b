"""Markers of finished runs: a run whose inputs are byte for byte the same need not be run again."""

import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdlab.paths import DATA, REPOSITORY
from kdlab.source import source_sha256

HASHED_FILE_LIMIT = 64 << 20  # bytes; of larger files and of checkpoints only names, sizes and times are looked at


def marker_path(output: Path) -> Path:
    """Return where the marker of `output` lies."""
    return output.with_suffix(".done.json")


def run_fingerprint(notebook: Path, parameters: Mapping[str, Any], content: bytes | None = None) -> str:
    """Hash all that decides what a run gives.

    That is the notebook, its parameters, kdlab's source, the shipped data, files that parameters name, and the
    interpreter with its torch.

    Args:
        notebook: the file.
        parameters: the values given, in their JSON form.
        content: of the file, where it was read already.

    Returns:
        A SHA-256 in hexadecimal.

    Raises:
        OSError: the notebook or shipped data cannot be read.
    """
    parts = {
        "notebook": _file_sha256(notebook) if content is None else hashlib.sha256(content).hexdigest(),
        "parameters": dict(parameters),
        "source": source_sha256(),
        "data": _folder_sha256(DATA),
        "named": {text: _look(notebook.parent, text) for text in sorted(_texts(parameters.values()))},
        "python": [sys.executable, sys.version, importlib.metadata.version("torch")],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_done(output: Path, fingerprint: str) -> bool:
    """Say whether `output` is the whole result of a run with this fingerprint, unchanged since."""
    try:
        marker = json.loads(marker_path(output).read_text())
        return marker["fingerprint"] == fingerprint and marker["output_sha256"] == _file_sha256(output)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def marker_problem(output: Path) -> str | None:
    """Return why `output` is not what a finished run left there, None where it is.

    Whatever its inputs are by now: a report is about the run that was.
    """
    try:
        marker = json.loads(marker_path(output).read_text())
        same = marker["output_sha256"] == _file_sha256(output)
    except (OSError, ValueError, KeyError, TypeError):
        return f"no marker of a finished run lies beside it ({marker_path(output).name})"
    return None if same else "it was changed after its run"


def write_marker(output: Path, content: Path, fingerprint: str, seconds: float) -> None:
    """Write the marker of a finished run; it is there whole or not at all.

    Args:
        output: the executed notebook that it vouches for.
        content: where its bytes are now.
        fingerprint: of the run.
        seconds: that it took.
    """
    marker = {"fingerprint": fingerprint, "output_sha256": _file_sha256(content), "seconds": round(seconds, 3)}
    write_whole(marker_path(output), json.dumps(marker, indent=1) + "\n")


def marked_seconds(output: Path) -> float:
    """Return how long the finished run of `output` took, in seconds."""
    return float(json.loads(marker_path(output).read_text())["seconds"])


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is there whole or not at all; its folder is made when missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder_sha256(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    parts = [f"{path.relative_to(folder).as_posix()} {_file_sha256(path)}" for path in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _texts(values: Any) -> set[str]:
    found: set[str] = set()
    for value in values:
        if isinstance(value, list):
            found |= _texts(value)
        elif isinstance(value, str) and value:
            found.add(value)
    return found


def _look(folder: Path, text: str) -> list[Any]:
    """Describe the files and checkpoints that a text parameter may name, seen from `folder` and from the repository.

    Other folders are left out: a run writes into those that its parameters name.
    """
    return [_describe(root / text) for root in (folder, REPOSITORY)]


def _describe(path: Path) -> Any:
    try:
        if path.is_file() and path.stat().st_size <= HASHED_FILE_LIMIT:
            return _file_sha256(path)
        if path.is_file():
            return [path.stat().st_size, path.stat().st_mtime_ns]
        if (path / "config.json").is_file():
            return [[entry.name, entry.stat().st_size, entry.stat().st_mtime_ns] for entry in sorted(path.iterdir())]
    except (OSError, ValueError):
        return None  # text that no file system takes for a path
    return None
