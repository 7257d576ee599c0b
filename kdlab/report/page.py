"""The frame of every report: one HTML document that runs nothing, loads nothing and knows its inputs' digest."""

import hashlib
import importlib.metadata
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from kdlab.errors import KdlabError
from kdlab.source import source_sha256

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE_FILE = Path(__file__).with_name("report.css")
RENDERERS = ("nbconvert", "nh3")
DIGEST_NAME = "kdlab-inputs"
_DIGEST = re.compile(rf'<meta name="{DIGEST_NAME}" content="([0-9a-f]+)">')


def document(title: str, digest: str, body: str) -> str:
    """Return a whole document.

    Args:
        title: plain text.
        digest: of its inputs, in hexadecimal.
        body: balanced HTML.
    """
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="{DIGEST_NAME}" content="{digest}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE_FILE.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def inputs_digest(parts: Sequence[str]) -> str:
    """Hash what decides a report: `parts`, kdlab's source, the style and the packages that render.

    Raises:
        KdlabError: a package of the extra `report` is not installed.
    """
    own = [source_sha256(), STYLE_FILE.read_text(encoding="utf-8"), *map(_renderer_version, RENDERERS)]
    return hashlib.sha256("\0".join([*own, *parts]).encode()).hexdigest()


def digest_of(html: Path) -> str | None:
    """Return the inputs' digest that a report states, None where there is no such report."""
    if not html.is_file():
        return None
    with html.open(encoding="utf-8", errors="replace") as file:
        found = _DIGEST.search(file.read(4096))
    return found[1] if found else None


def _renderer_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError as error:
        need = f"a report needs kdlab's extra `report` ({', '.join(RENDERERS)}), and {name} is not installed"
        raise KdlabError(f"{need}: pip install {' '.join(RENDERERS)}") from error
