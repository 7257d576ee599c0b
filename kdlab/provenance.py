"""Where a result comes from: one JSON-able dictionary that every recorded run and every result row carries."""

import dataclasses
import hashlib
import math
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdlab import __version__
from kdlab.errors import ArgumentError
from kdlab.machine import machine_facts
from kdlab.paths import PACKAGE, REPOSITORY

RUN_FIELDS = (
    "target_sha256", "drafter_sha256", "target_config", "drafter_config",
    "prompt_set_id", "prompt_set_digest", "template_hash", "thinking",
    "method", "budget", "width", "top_k", "block_size", "max_new_tokens", "stop_token_ids",
    "temperature", "top_p", "seed", "streams", "graph", "impl", "device", "dtype",
)  # fmt: skip
"""What the caller knows of its run; a field that it does not give stands as None."""

COMPARED_FIELDS = (
    "target_sha256", "drafter_sha256", "prompt_set_digest", "template_hash", "thinking",
    "max_new_tokens", "temperature", "top_p", "streams", "graph", "dtype",
)  # fmt: skip
"""What must be equal in results that stand side by side, the field that the comparison is about excepted."""

GIT_TIMEOUT_S = 5.0


def run_provenance(**fields: Any) -> dict[str, Any]:
    """Describe a run that starts now: code, machine and the caller's fields.

    Args:
        fields: `RUN_FIELDS` and any others, kept under their names. Tuples, sets, dataclasses, paths, dtypes, devices
            and numpy or one-element torch numbers become their JSON form; sets are sorted.

    Returns:
        A dictionary that `json.dumps` writes and `json.loads` gives back equal; unknown facts are None.

    Raises:
        ArgumentError: a field has no JSON form, or is one that this function states by itself.
    """
    own = {"run_id": str(uuid.uuid4()), "started_utc": datetime.now(UTC).isoformat(timespec="milliseconds")}
    device = fields.get("device")
    own |= code_facts() | machine_facts(None if device is None else torch.device(device))
    for name in fields:
        if name in own:
            raise ArgumentError(name, "a field that kdlab does not state by itself", fields[name])
    return own | dict.fromkeys(RUN_FIELDS) | {name: _to_json(name, value) for name, value in fields.items()}


def code_facts() -> dict[str, Any]:
    """Return the version, the source hash and the git commit of the kdlab that runs."""
    commit, dirty = git_state(REPOSITORY)
    return {
        "kdlab_version": __version__,
        "git_commit": commit,
        "git_dirty": dirty,
        "source_sha256": source_sha256(),
    }


def source_sha256(folder: Path = PACKAGE) -> str:
    """Hash names and bytes of every `.py` file of `folder`: a run with another hash of the package is stale."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """Return (commit, whether a tracked file differs from it) of the checkout whose top is `root`, or (None, None).

    A package that is installed inside somebody else's checkout is not of that commit, so `root` must be the top itself.
    """
    if not (root / ".git").exists():
        return None, None
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit, None if commit is None or status is None else bool(status)


def _git(root: Path, *arguments: str) -> str | None:
    # The folders are named because a GIT_DIR in the environment (a hook's) would speak of another repository;
    # without optional locks a question never stands in the way of a commit.
    place = ("--no-optional-locks", f"--git-dir={root / '.git'}", f"--work-tree={root}")
    try:
        answer = subprocess.run(
            ("git", *place, *arguments), cwd=root, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _to_json(name: str, value: Any) -> Any:
    """Return the JSON form of `value`; `name` is where it stands, for the error."""
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device | Path):
        return str(value)
    return _container_to_json(name, value)


def _container_to_json(name: str, value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _to_json(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_to_json(f"{name}[{i}]", item) for i, item in enumerate(value)]
    raise ArgumentError(name, "a value with a JSON form (finite numbers, text, lists, dictionaries)", repr(value))
