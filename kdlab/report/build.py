"""One self-contained HTML report from executed notebooks."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError, NotebookError
from kdlab.report.cells import render_notebook, shown_cells
from kdlab.report.contents import render_contents
from kdlab.report.done_marker import marker_path, write_whole
from kdlab.report.figures import check_figures
from kdlab.report.named import given_parameters
from kdlab.report.notebook_file import read_notebook
from kdlab.report.outcome import read_outcome
from kdlab.report.page import digest_of, document, inputs_digest
from kdlab.report.provenance_table import render_provenance
from kdlab.report.summary import render_summary, render_unfinished

TITLE = "kdlab report"


def build_report(
    notebooks: Sequence[str | Path],
    html: str | Path = "reports/kdlab.html",
    *,
    title: str = TITLE,
    unfinished: Mapping[str, str] | None = None,
    names: Sequence[str] | None = None,
) -> Path:
    """Write text and outputs of executed notebooks as one HTML file that needs nothing else.

    Title, contents and the conclusions of the result records come first, the provenance last. The file holds no code
    cells, no scripts and no address outside itself; figures are embedded, and their number is that of the notebooks.
    Equal notebooks give equal bytes, and a report that is there already with the same inputs is left as it is.

    Args:
        notebooks: finished runs, in the report's order.
        html: the file to write; its folder is made when missing.
        title: plain text.
        unfinished: notebooks that the report is to name first as missing, and why.
        names: plain text, one a notebook; None takes the files' names.

    Returns:
        The path of the report.

    Raises:
        ArgumentError: no notebooks were given, one of them is no notebook, or names are not as many.
        NotebookError: one of them is no finished run, or a figure of it did not reach the report.
        KdlabError: the packages of the extra `report` are not installed.
        OSError: a file cannot be read or written.
    """
    if not notebooks:
        raise ArgumentError("notebooks", "at least one executed notebook", "none")
    paths, html = [Path(path) for path in notebooks], Path(html)
    labels = [path.stem for path in paths] if names is None else list(names)
    if len(labels) != len(paths):
        raise ArgumentError("names", f"one for each of {len(paths)} notebooks", len(labels))
    missing = render_unfinished(unfinished or {})
    named = list(zip(labels, paths, strict=True))
    digest = inputs_digest([title + missing, *(text for label, path in named for text in _inputs(label, path))])
    if digest_of(html) != digest:
        parts = [_render(number, label, path) for number, (label, path) in enumerate(named, 1)]
        write_whole(html, _page(parts, title, missing, digest))
    return html


@dataclass(frozen=True, slots=True)
class _Part:
    """A notebook rendered: where it stands in the page, and what is to be said of it elsewhere."""

    anchor: str
    name: str
    html: str
    record: dict[str, Any]
    num_figures: int
    run_facts: dict[str, Any]


def _inputs(name: str, path: Path) -> list[str]:
    return [name, _sha256(path), _sha256(marker_path(path)) if marker_path(path).is_file() else ""]


def _render(number: int, name: str, path: Path) -> _Part:
    notebook = read_notebook(path)
    record = _finished_record(notebook, path)
    anchor = f"part-{number}"
    html = render_notebook(notebook, f"{anchor}-")
    num_figures = check_figures(name, shown_cells(notebook), record, html)
    facts = {"parameters": given_parameters(path), "executed notebook": f"{path.name}, sha256 {_sha256(path)}"}
    return _Part(anchor, name, html, record, num_figures, facts)


def _page(parts: list[_Part], title: str, missing: str, digest: str) -> str:
    num_figures = sum(part.num_figures for part in parts)
    notebooks, figures = ("" if count == 1 else "s" for count in (len(parts), num_figures))
    size = f"{len(parts)} notebook{notebooks}, {num_figures} figure{figures}"
    entries = [(part.anchor, part.name, part.html) for part in parts]
    contents = render_contents([*entries, ("provenance", "Provenance", "")])
    summary = render_summary([(part.name, part.anchor, part.record) for part in parts])
    sections = [f'<section id="{part.anchor}">\n{part.html}\n</section>' for part in parts]
    provenance = render_provenance([(part.name, part.record, part.run_facts) for part in parts])
    head = f"<header><h1>{escape(title)}</h1>\n<p>{size}.</p></header>"
    return document(title, digest, "\n".join([head, missing, summary, contents, *sections, provenance]))


def _finished_record(notebook: Any, path: Path) -> dict[str, Any]:
    outcome = read_outcome(notebook)
    if outcome.problem or outcome.record is None:
        raise NotebookError(f"{path} is no finished run: {outcome.problem}; run it with `kdlab run` first")
    return outcome.record


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
