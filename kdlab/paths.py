"""Where the files of the repository lie."""

import re
from pathlib import Path

from kdlab.errors import ArgumentError

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent
DATA = REPOSITORY / "data"
RUNS = REPOSITORY / "runs"
GRIDS = RUNS / "grids"
GRID_RESULTS = "results.parquet"
# The CUDA sources: an installed wheel holds them inside the package, a clone (or an editable install of it) beside it.
CSRC = PACKAGE / "csrc" if (PACKAGE / "csrc").is_dir() else REPOSITORY / "csrc"

_MINI, _TINY = DATA / "kimi-k26-mini", DATA / "tiny-pair"

# Target and drafter of each shipped pair, by the name that `load_pair` takes.
BUNDLED_PAIRS = {
    "bundled": (_MINI / "target", _MINI / "drafter-b8"),
    "bundled-b16": (_MINI / "target", _MINI / "drafter-b16"),
    "tiny": (_TINY / "target", _TINY / "drafter"),
}

# config.json of Kimi K2.6 and of its drafter, in `target` and `drafter`: shapes without weights.
K26_SHAPES = DATA / "kimi-k26-shapes"


def bundled_pair(name: str) -> tuple[Path, Path]:
    """Directories of the target and the drafter of a shipped pair.

    Raises:
        ArgumentError: the name is unknown, or the package runs without its repository's `data/`.
    """
    if name not in BUNDLED_PAIRS:
        shipped = ", ".join(sorted(BUNDLED_PAIRS))
        raise ArgumentError("target", f"a directory, or a shipped pair ({shipped})", repr(name))
    target, drafter = BUNDLED_PAIRS[name]
    if not target.is_dir():
        raise ArgumentError("target", f"{target} (kdlab runs from a clone of its repository)", repr(name))
    return target, drafter


def grid_folder(name: str, folder: str | Path | None = None) -> Path:
    """Return the folder of the grid called `name`: in `folder`, or in the clone's `runs/grids`.

    Raises:
        ArgumentError: `name` is not letters, digits, `.`, `_` and `-`.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ArgumentError("name", "letters, digits, '.', '_' and '-', the first a letter or digit", repr(name))
    return (GRIDS if folder is None else Path(folder)) / name
