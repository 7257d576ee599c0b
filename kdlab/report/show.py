"""A figure shown in a notebook and kept as a file, the same bytes in both places; its vector forms in the notebook."""

from pathlib import Path
from typing import TYPE_CHECKING

from kdlab.report.done_marker import write_whole
from kdlab.report.figures import FIGURE_KEY
from kdlab.report.vectors import VECTOR_MIME, pack_vectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110.0


def show_figure(drawing: "Axes | Figure", path: str | Path, *, dpi: float = DPI) -> None:
    """Write the whole figure of `drawing` to `path` as PNG and display that PNG in the notebook that runs.

    The output holds the figure as SVG and PDF too, unseen: `kdlab report` writes all three into its `figures/`.
    Its text form, and the alternative text of the picture, is the figure's title, or the file's name where it has none.

    Args:
        drawing: axes or a figure; it need not belong to pyplot.
        path: the file; its folder is made when missing.
        dpi: dots per inch; at 110 a figure of 13 inches is some 100 KB.
    """
    from IPython.display import display

    from kdlab.viz import figure_of, png_bytes

    path, image = Path(path), png_bytes(drawing, dpi)
    write_whole(path, image)
    words = _title(figure_of(drawing)) or path.stem.replace("_", " ")
    metadata = {FIGURE_KEY: path.name, "image/png": {"alt": words}}
    forms = {"image/png": image, "text/plain": words, VECTOR_MIME: pack_vectors(drawing)}
    display(forms, raw=True, metadata=metadata)


def _title(figure: "Figure") -> str:
    # `viz.theme.add_figure_heading` writes a figure's title as that of its legend.
    titles = [figure.get_suptitle(), *(legend.get_title().get_text() for legend in figure.legends)]
    titles += [ax.get_title(loc=side) for ax in figure.axes for side in ("left", "center", "right")]
    return next((" ".join(title.split()) for title in titles if title.strip()), "")
