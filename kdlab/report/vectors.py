"""A figure as SVG and PDF beside its PNG in a notebook's output, and read back from there, harmless or refused."""

import base64
import binascii
import re
import zlib
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from kdlab.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A type of our own: JupyterLab would show an SVG in place of the PNG, and hide it in a notebook that is not trusted.
VECTOR_MIME = "application/vnd.kdlab.vectors+json"
FORMATS = ("svg", "pdf")
BYTE_LIMIT = 64 << 20  # of one figure unpacked; the largest of kdlab's own are under a megabyte
# Without the date and with a fixed salt of the ids equal figures are equal bytes.
_NO_DATE: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
_SVG_TAGS = {
    "svg", "metadata", "RDF", "Work", "type", "creator", "Agent", "title", "format", "date", "defs", "style", "g",
    "path", "clipPath", "rect", "use", "image", "text", "tspan", "linearGradient", "stop", "mask", "filter",
    "feColorMatrix", "pattern",
}  # fmt: skip
_ADDRESS = re.compile(r"@import|url\(\s*['\"]?(?!#)", re.IGNORECASE)


def pack_vectors(drawing: "Axes | Figure") -> dict[str, str]:
    """Return the whole figure of `drawing` in every format of FORMATS, packed for a notebook.

    Returns:
        {format: base64 of the zlib-compressed file}; text is drawn as outlines, so that no font is needed.
    """
    from matplotlib import rc_context

    from kdlab.viz import figure_of

    packed = {}
    with rc_context({"svg.hashsalt": "kdlab", "svg.fonttype": "path"}):
        for name in FORMATS:
            buffer = BytesIO()
            figure_of(drawing).savefig(buffer, format=name, metadata=_NO_DATE[name])
            packed[name] = base64.b64encode(zlib.compress(buffer.getvalue())).decode()
    return packed


def unpack_vectors(packed: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files that `pack_vectors` packed.

    Raises:
        ArgumentError: one is broken, too large, or an SVG that holds what a drawing does not need (scripts, links).
    """
    return {name: _unpack(name, packed[name]) for name in FORMATS if name in packed}


def _unpack(name: str, text: str) -> bytes:
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(text, validate=True), BYTE_LIMIT)
    except (binascii.Error, zlib.error, TypeError, ValueError) as error:
        raise ArgumentError("figure", f"a packed {name} file", f"a broken one ({error})") from error
    if not unpacker.eof:
        raise ArgumentError("figure", f"a whole {name} file of at most {BYTE_LIMIT >> 20} MiB", "another")
    if name == "svg":
        _check_svg(content)
    elif not content.startswith(b"%PDF-"):
        raise ArgumentError("figure", "a PDF file", "another")
    return content


def _check_svg(content: bytes) -> None:
    """Refuse an SVG that could run or load anything: a notebook from elsewhere may hold one."""
    try:
        elements = list(ElementTree.fromstring(content).iter())
    except ElementTree.ParseError as error:
        raise ArgumentError("figure", "an SVG file", f"what is no XML ({error})") from error
    for element in elements:
        tag = str(element.tag).rpartition("}")[2]
        if tag not in _SVG_TAGS or _ADDRESS.search(element.text or ""):
            raise ArgumentError("figure", "an SVG that is a drawing and nothing else", f"one with <{tag}>")
        for attribute, value in element.attrib.items():
            name = attribute.rpartition("}")[2].lower()
            leaves = name == "href" and not value.startswith(("#", "data:image/png;base64,"))
            if name.startswith("on") or leaves or _ADDRESS.search(value):
                raise ArgumentError("figure", "an SVG that is a drawing and nothing else", f"one with {name}={value!r}")
