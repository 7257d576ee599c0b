"""A figure in a notebook that is replaced in place, in light and in dark themes."""

from pathlib import Path

import anywidget
import traitlets
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdlab.viz.theme import png_bytes

_DPI = 110.0


class FigureImage(anywidget.AnyWidget):
    """The PNG of a matplotlib figure; `show` may be called from any thread.

    Attributes:
        png: the picture.
        words: its text form, for those who do not see it.
    """

    _esm = Path(__file__).with_name("figure_image.js")
    _css = Path(__file__).with_name("figure_image.css")
    png = traitlets.Bytes(b"").tag(sync=True)
    words = traitlets.Unicode("").tag(sync=True)

    def show(self, drawing: Axes | Figure, words: str) -> None:
        """Draw the whole figure of `drawing` in place of the one on show."""
        with self.hold_sync():
            self.words = words
            self.png = png_bytes(drawing, _DPI)
