"""The figures of executed notebooks as PNG files."""

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError
from kdlab.report.done_marker import write_whole
from kdlab.report.runner import read_notebook

TAG_PREFIX = "figure:"


def export_figures(notebooks: Sequence[str | Path], folder: str | Path = "figures") -> list[Path]:
    """Write every PNG output of executed notebooks into `folder` and return the files in the notebooks' order.

    A figure of a cell tagged `figure:NAME` becomes `NAME.png` (from its second one on `NAME-2.png`); any other becomes
    `<notebook>-<number>.png`.

    Raises: ArgumentError when a tag's name is no file stem or is used twice; OSError.
    """
    written: dict[Path, bytes] = {}
    for notebook in notebooks:
        for stem, image in _figures(Path(notebook)):
            path = Path(folder) / f"{stem}.png"
            if path in written:
                raise ArgumentError("notebooks", "each figure name once", stem)
            written[path] = image
    for path, image in written.items():
        write_whole(path, image)
    return list(written)


def _figures(path: Path) -> Iterator[tuple[str, bytes]]:
    unnamed = 0
    for cell in read_notebook(path)["cells"]:
        outputs = [output.get("data", {}) for output in cell.get("outputs", [])]
        images = [data["image/png"] for data in outputs if "image/png" in data]
        name = _figure_name(cell)
        for number, image in enumerate(images, 1):
            unnamed += name is None
            stem = f"{path.stem}-{unnamed}" if name is None else name if number == 1 else f"{name}-{number}"
            yield stem, base64.b64decode("".join(image))


def _figure_name(cell: Any) -> str | None:
    names = [tag.removeprefix(TAG_PREFIX) for tag in cell["metadata"].get("tags", []) if tag.startswith(TAG_PREFIX)]
    if not names:
        return None
    if len(names) > 1 or not re.fullmatch(r"[\w-]+", names[0]):
        raise ArgumentError("cell tag", f"one {TAG_PREFIX}NAME of letters, digits, - and _", ", ".join(names))
    return names[0]
