"""The figures of executed notebooks: their files in every format, and whether all of them reached a report."""

import base64
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError, NotebookError
from kdlab.report.done_marker import write_whole
from kdlab.report.notebook_file import read_notebook_json
from kdlab.report.vectors import VECTOR_MIME, unpack_vectors

FIGURE_KEY = "kdlab_figure"
"""Where an output's metadata says which file name `show_figure` gave its picture."""
IMAGE_MIMES = ("image/png", "image/jpeg")
_IMAGE = re.compile(r'src="data:image/(?:png|jpeg);base64,([A-Za-z0-9+/=\s]+)"')


def export_figures(notebooks: Sequence[str | Path], folder: str | Path = "figures") -> list[Path]:
    """Write every PNG output of executed notebooks into `folder`, in the notebooks' order, and its SVG and PDF forms.

    A picture that `show_figure` displayed keeps its file's name, and has all three forms; any other is a PNG alone and
    becomes `<notebook>-<number>.png`.

    Args:
        notebooks: executed notebooks.
        folder: made when missing.

    Returns:
        The files written; those of one picture in a row, the PNG first.

    Raises:
        ArgumentError: two pictures have one name, a file is no notebook, or an SVG is more than a drawing.
        OSError: a file cannot be read or written.
    """
    written: dict[Path, bytes] = {}
    for notebook in notebooks:
        for name, content in _figures(Path(notebook)):
            path = Path(folder) / name
            if path in written:
                raise ArgumentError("notebooks", "each figure name once", name)
            written[path] = content
    for path, content in written.items():
        write_whole(path, content)
    return list(written)


def check_figures(name: str, cells: Sequence[Mapping[str, Any]], record: Mapping[str, Any], html: str) -> int:
    """Return how many figures a notebook shows; every one of them must be in its part of the report.

    Args:
        name: of the notebook, for the message.
        cells: its cells that a report shows.
        record: its result record; names that it lists under `figures` must be among the figures that it shows.
        html: its part of the report.

    Raises:
        NotebookError: the report lacks a figure, or the record lists one that the notebook does not show.
    """
    shown = [output for cell in cells for output in cell.get("outputs", []) if _image(output) is not None]
    wanted = Counter(_bare(_image(output)) for output in shown)
    missing = (wanted - Counter(_bare(text) for text in _IMAGE.findall(html))).total()
    if missing:
        raise NotebookError(f"{name}: {missing} of its {wanted.total()} figures did not reach the report")
    names = {_name(output) for output in shown}
    listed = record.get("figures")
    lost = [figure for figure in listed if figure not in names] if isinstance(listed, list) else []
    if lost:
        said = ", ".join(map(str, lost))
        raise NotebookError(f"{name}: its result record lists figures that it does not show: {said}")
    return wanted.total()


def _figures(path: Path) -> Iterator[tuple[str, bytes]]:
    unnamed = 0
    for cell in read_notebook_json(path)["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" not in data:
                continue
            name = _name(output)
            unnamed += not name
            name = name or f"{path.stem}-{unnamed}.png"
            yield name, base64.b64decode("".join(data["image/png"]))
            for form, content in unpack_vectors(data.get(VECTOR_MIME) or {}).items():
                yield str(Path(name).with_suffix(f".{form}")), content


def _name(output: Mapping[str, Any]) -> str:
    # Only the last part: a notebook from elsewhere must not choose the folder.
    return Path(str(output.get("metadata", {}).get(FIGURE_KEY, ""))).name


def _image(output: Mapping[str, Any]) -> Any:
    data = output.get("data", {})
    return next((data[mime] for mime in IMAGE_MIMES if mime in data), None)


def _bare(text: Any) -> str:
    return "".join("".join(text).split())
