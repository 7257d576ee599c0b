"""Where the files of the repository lie."""

from pathlib import Path

from kdlab.errors import ArgumentError

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent
DATA = REPOSITORY / "data"

BUNDLED_PAIRS = {"bundled": DATA / "tiny-pair"}


def bundled_pair(name: str) -> tuple[Path, Path]:
    """Directories of the target and the drafter of a shipped pair.

    Raises:
        ArgumentError: the name is unknown, or the package runs without its repository's `data/`.
    """
    if name not in BUNDLED_PAIRS:
        shipped = ", ".join(sorted(BUNDLED_PAIRS))
        raise ArgumentError("target", f"a directory, or a shipped pair ({shipped})", repr(name))
    root = BUNDLED_PAIRS[name]
    if not root.is_dir():
        raise ArgumentError("target", f"{root} (kdlab runs from a clone of its repository)", repr(name))
    return root / "target", root / "drafter"
