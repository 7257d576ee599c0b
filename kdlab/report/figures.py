"""The figures of executed notebooks as PNG files."""

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path

from kdlab.errors import ArgumentError
from kdlab.report.done_marker import write_whole
from kdlab.report.notebook_file import read_notebook_json

FIGURE_KEY = "kdlab_figure"
"""Where an output's metadata says which file name `show_figure` gave its picture."""


def export_figures(notebooks: Sequence[str | Path], folder: str | Path = "figures") -> list[Path]:
    """Write every PNG output of executed notebooks into `folder`, in the notebooks' order.

    A picture that `show_figure` displayed keeps its file's name; any other becomes `<notebook>-<number>.png`.

    Args:
        notebooks: executed notebooks.
        folder: made when missing.

    Returns:
        The files written, one a picture.

    Raises:
        ArgumentError: two pictures have one name, or a file is no notebook.
        OSError: a file cannot be read or written.
    """
    written: dict[Path, bytes] = {}
    for notebook in notebooks:
        for name, image in _figures(Path(notebook)):
            path = Path(folder) / name
            if path in written:
                raise ArgumentError("notebooks", "each figure name once", name)
            written[path] = image
    for path, image in written.items():
        write_whole(path, image)
    return list(written)


def _figures(path: Path) -> Iterator[tuple[str, bytes]]:
    unnamed = 0
    for cell in read_notebook_json(path)["cells"]:
        for output in cell.get("outputs", []):
            image = output.get("data", {}).get("image/png")
            if image is None:
                continue
            # Only the last part: a notebook from elsewhere must not choose the folder.
            name = Path(str(output.get("metadata", {}).get(FIGURE_KEY, ""))).name
            unnamed += not name
            yield name or f"{path.stem}-{unnamed}.png", base64.b64decode("".join(image))
