"""The code that runs: its version, its hash and its git commit. Needs neither torch nor numpy, so asking is quick."""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

from kdlab.paths import CSRC, PACKAGE, REPOSITORY

VERSION = "0.1.0"
GIT_TIMEOUT_S = 5.0


def code_facts() -> dict[str, Any]:
    """Return the version, the source hash and the git commit of the kdlab that runs."""
    commit, dirty = git_state(REPOSITORY)
    return {
        "kdlab_version": VERSION,
        "git_commit": commit,
        "git_dirty": dirty,
        "source_sha256": source_sha256(),
    }


def source_sha256(package: Path = PACKAGE, csrc: Path = CSRC) -> str:
    """Hash names and bytes of the package's `.py` files and of the CUDA sources: a run with another hash is stale."""
    digest = hashlib.sha256()
    for folder, pattern in ((package, "*.py"), (csrc, "*.cu*")):
        for path in sorted(folder.rglob(pattern), key=lambda path: path.relative_to(folder).as_posix()):
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
