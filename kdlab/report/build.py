"""One self-contained HTML report from executed notebooks."""

import hashlib
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kdlab.errors import ArgumentError, KdlabError, NotebookError
from kdlab.report.cells import render_notebook
from kdlab.report.done_marker import write_whole
from kdlab.report.notebook_file import read_notebook
from kdlab.report.outcome import read_outcome
from kdlab.report.provenance_table import render_provenance
from kdlab.report.summary import render_summary, render_unfinished
from kdlab.source import source_sha256

TITLE = "kdlab report"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE_FILE = Path(__file__).with_name("report.css")
RENDERERS = ("nbconvert", "nh3")
DIGEST_NAME = "kdlab-inputs"
_DIGEST = re.compile(rf'<meta name="{DIGEST_NAME}" content="([0-9a-f]+)">')


def build_report(
    notebooks: Sequence[str | Path],
    html: str | Path = "reports/kdlab.html",
    *,
    title: str = TITLE,
    unfinished: Mapping[str, str] | None = None,
) -> Path:
    """Write text and outputs of executed notebooks as one HTML file that needs nothing else.

    Title and the conclusions of the result records come first. The file holds no code cells, no scripts and no address
    outside itself; figures are embedded. Equal notebooks give equal bytes, and a report that is there already with the
    same inputs is left as it is.

    Args:
        notebooks: finished runs, in the report's order.
        html: the file to write; its folder is made when missing.
        title: plain text.
        unfinished: notebooks that the report is to name first as missing, and why.

    Returns:
        The path of the report.

    Raises:
        ArgumentError: no notebooks were given, or one of them is no notebook.
        NotebookError: one of them is no finished run.
        KdlabError: the packages of the extra `report` are not installed.
        OSError: a file cannot be read or written.
    """
    if not notebooks:
        raise ArgumentError("notebooks", "at least one executed notebook", "none")
    paths, html = [Path(path) for path in notebooks], Path(html)
    missing = render_unfinished(unfinished or {})
    digest = _inputs_digest(paths, title + missing)
    if _digest_of(html) != digest:
        write_whole(html, _page(paths, title, missing, digest))
    return html


def _inputs_digest(paths: list[Path], title: str) -> str:
    parts = [title, source_sha256(), STYLE_FILE.read_text(encoding="utf-8"), *map(_renderer_version, RENDERERS)]
    for path in paths:
        parts += [path.stem, hashlib.sha256(path.read_bytes()).hexdigest()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _renderer_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError as error:
        need = f"a report needs kdlab's extra `report` ({', '.join(RENDERERS)}), and {name} is not installed"
        raise KdlabError(f"{need}: pip install {' '.join(RENDERERS)}") from error


def _digest_of(html: Path) -> str | None:
    if not html.is_file():
        return None
    with html.open(encoding="utf-8", errors="replace") as file:
        found = _DIGEST.search(file.read(4096))
    return found[1] if found else None


def _page(paths: list[Path], title: str, missing: str, digest: str) -> str:
    sections, records = [], []  # records: (name, anchor, record)
    for number, path in enumerate(paths, 1):
        notebook = read_notebook(path)
        record = _finished_record(notebook, path)
        part = f"part-{number}"
        records.append((path.stem, part, record))
        sections.append(f'<section id="{part}">\n{render_notebook(notebook, f"{part}-")}\n</section>')
    links = [(anchor, name) for name, anchor, _ in records] + [("provenance", "provenance")]
    contents = " · ".join(f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name in links)
    provenance = render_provenance([(name, record) for name, _, record in records])
    head = f"<header><h1>{escape(title)}</h1></header>\n<nav>{contents}</nav>"
    return _document(title, digest, "\n".join([head, missing, render_summary(records), *sections, provenance]))


def _document(title: str, digest: str, body: str) -> str:
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="{DIGEST_NAME}" content="{digest}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE_FILE.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _finished_record(notebook: Any, path: Path) -> dict[str, Any]:
    outcome = read_outcome(notebook)
    if outcome.problem or outcome.record is None:
        raise NotebookError(f"{path} is no finished run: {outcome.problem}; run it with `kdlab run` first")
    return outcome.record
