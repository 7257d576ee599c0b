"""The pages of Debian's python3.11-doc as plain paragraphs."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_BLOCKS = {
    "p", "div", "section", "li", "dt", "dd", "h1", "h2", "h3", "h4", "h5", "tr", "pre", "table", "ul", "ol", "dl",
}  # fmt: skip
_SKIPPED = {"script", "style"}
_VOID = {"br", "hr", "img", "link", "meta", "input", "col", "wbr", "source"}
_NOT_PROSE = ("genindex", "search", "contents", "py-modindex", "download", "whatsnew/changelog")


class _MainText(HTMLParser):
    """Collects the text inside the element with role="main"; code blocks keep their lines."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._depth = 0
        self._skipping = 0
        self._in_code = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            return
        values = dict(attrs)
        if self._depth or values.get("role") == "main":
            self._depth += 1
            self._in_code += self._in_code > 0 or tag == "pre"
            headerlink = "headerlink" in (values.get("class") or "")
            self._skipping += self._skipping > 0 or tag in _SKIPPED or headerlink
            if tag in _BLOCKS:
                self.parts.append("\n\n" if tag not in ("li", "tr", "dt") else "\n")

    def handle_endtag(self, tag: str) -> None:
        if self._depth and tag not in _VOID:
            self._depth -= 1
            self._in_code -= self._in_code > 0
            self._skipping -= self._skipping > 0
            if tag in _BLOCKS:
                self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._depth and not self._skipping:
            self.parts.append(data if self._in_code else re.sub(r"\s+", " ", data))


def page_text(html: str) -> str:
    """Return the main text of one page, its paragraphs apart by a blank line."""
    parser = _MainText()
    parser.feed(html)
    lines = [line.rstrip() for line in "".join(parser.parts).replace("\xa0", " ").split("\n")]
    lines = [line.lstrip() if line.startswith(" ") and not line.startswith("  ") else line for line in lines]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip().translate(_ASCII) + "\n"


_ASCII = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "¶": "", "→": "->", "•": "*"}
)


def html_documents(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of every page below `root`, indexes and search pages left out."""
    for file in sorted(root.rglob("*.html")):
        name = str(file.relative_to(root))
        if not name.startswith(_NOT_PROSE) and "_static" not in name:
            yield f"python3.11-doc:{name}", page_text(file.read_text(encoding="utf-8"))
