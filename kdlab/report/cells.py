"""An executed notebook as a piece of HTML: text and outputs by nbconvert, no code, nothing that runs or loads."""

import warnings
from collections.abc import Mapping
from typing import Any

from kdlab.report.outcome import RESULT_MIME
from kdlab.report.params import INJECTED_TAG, TAG
from kdlab.report.sanitize import sanitize_html

HIDDEN_TAGS = {"no-report", TAG, INJECTED_TAG}
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
# Of an output in several forms the first of these is shown: a figure before its description, a table before its text.
SHOWN_MIMES = ["image/png", "image/jpeg", "text/html", "text/markdown", "text/plain"]


def render_notebook(notebook: Any, id_prefix: str = "") -> str:
    """Return what a reader of the executed notebook should see, as harmless HTML.

    Left out are code, cells with one of `HIDDEN_TAGS`, result records (the provenance section shows them) and widgets
    that have no static form. Formulas stay TeX source; of a progress bar the last state is shown.

    Args:
        notebook: nbformat 4; it is not changed.
        id_prefix: put before the ids of its headings.

    Returns:
        A balanced piece of HTML; its pictures are data in it.
    """
    exporter = _exporter()
    with warnings.catch_warnings():
        # An output that a report cannot show, a sound for example, is left out, and that is no news.
        warnings.filterwarnings("ignore", message="Your element with mimetype")
        html, _ = exporter.from_notebook_node(notebook)
    return sanitize_html(html, id_prefix).strip()


def shown_cells(notebook: Any) -> list[Any]:
    """Return the cells of a notebook that a report shows."""
    return [cell for cell in notebook.cells if HIDDEN_TAGS.isdisjoint(cell.metadata.get("tags", []))]


def _exporter() -> Any:
    # Imported here: nbconvert takes a second to load, and only a report needs it.
    from nbconvert.exporters import HTMLExporter
    from traitlets.config import Config

    config = Config()
    config.HTMLExporter.template_name = "basic"
    config.HTMLExporter.exclude_input = True
    config.HTMLExporter.exclude_input_prompt = config.HTMLExporter.exclude_output_prompt = True
    config.HTMLExporter.anchor_link_text = ""  # without these links headings would have no ids
    config.NbConvertBase.display_data_priority = SHOWN_MIMES
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_cell_tags = HIDDEN_TAGS
    config.CoalesceStreamsPreprocessor.enabled = True
    exporter = HTMLExporter(config=config)
    exporter.register_preprocessor(_drop_unshown, enabled=True)
    return exporter


def _drop_unshown(notebook: Any, resources: Any) -> tuple[Any, Any]:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _is_shown(output.get("data", {}))]
    return notebook, resources


def _is_shown(data: Mapping[str, Any]) -> bool:
    if RESULT_MIME in data:
        return False
    # A widget lives in its kernel; its text form is a Python expression.
    return WIDGET_MIME not in data or not set(SHOWN_MIMES[:-1]).isdisjoint(data)
