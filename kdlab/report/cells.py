"""Cells of an executed notebook as HTML: text and outputs, no code, nothing that runs or loads."""

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from kdlab.report.outcome import RESULT_MIME
from kdlab.report.sanitize import sanitize_html

HIDDEN_TAG = "no-report"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def render_cells(cells: list[Mapping[str, Any]]) -> str:
    """Return the markdown and the outputs of `cells`, one after the other; a cell tagged `no-report` is left out."""
    return "\n".join(part for cell in cells for part in _render_cell(cell) if part)


def _render_cell(cell: Mapping[str, Any]) -> Iterator[str]:
    if HIDDEN_TAG in cell.get("metadata", {}).get("tags", []):
        return
    if cell["cell_type"] == "markdown":
        yield render_markdown(_text(cell["source"]))
    for output in cell.get("outputs", []):
        yield _render_output(output)


def render_markdown(text: str) -> str:
    """Return markdown as harmless HTML; formulas stay as their TeX source, raw HTML goes through the sanitizer."""
    import mistune

    convert = mistune.create_markdown(escape=False, plugins=["table", "strikethrough", "math"])
    return sanitize_html(str(convert(text)))


def _render_output(output: Mapping[str, Any]) -> str:
    kind = output["output_type"]
    if kind == "stream":
        return _preformatted(_text(output["text"]))
    if kind == "error":
        return _preformatted(f"{output.get('ename')}: {output.get('evalue')}")
    data = output.get("data", {})
    if RESULT_MIME in data:
        return ""  # the provenance section shows it
    return _render_data(data)


def _render_data(data: Mapping[str, Any]) -> str:
    for mime in ("image/png", "image/jpeg"):
        if mime in data:
            image = re.sub(r"\s", "", _text(data[mime]))
            label = escape(_text(data.get("text/plain", "figure")))
            return f'<figure>{sanitize_html(f"""<img src="data:{mime};base64,{image}" alt="{label}">""")}</figure>'
    if "text/html" in data:
        return f'<div class="output">{sanitize_html(_text(data["text/html"]))}</div>'
    if "text/markdown" in data:
        return f'<div class="output">{render_markdown(_text(data["text/markdown"]))}</div>'
    if WIDGET_MIME in data:
        return ""  # a widget lives in its kernel; its static twin is an output of its own
    return _preformatted(_text(data.get("text/plain", "")))


def _preformatted(text: str) -> str:
    # A progress bar redraws its line after each carriage return: only the last state is worth reading.
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in _ANSI.sub("", text).split("\n")]
    text = "\n".join(lines).strip("\n")
    return f"<pre>{escape(text, quote=False)}</pre>" if text.strip() else ""


def _text(value: Any) -> str:
    return "".join(value) if isinstance(value, list) else str(value)
