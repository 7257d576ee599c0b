"""The contents list of a report: its parts and the headings in them, as links."""

import re
from collections.abc import Sequence
from html import escape

LONG = 4  # parts; of more of them the headings are folded away until asked for
_HEADING = re.compile(r'<h([12]) id="([^"]+)"[^>]*>(.*?)</h\1>', re.DOTALL)
_TAG = re.compile(r"<[^>]*>")


def render_contents(parts: Sequence[tuple[str, str, str]]) -> str:
    """Return the list.

    Args:
        parts: (anchor, name, HTML that `sanitize_html` made) of each part; empty HTML for one without headings.

    Returns:
        A `<nav>`.
    """
    items = [_item(anchor, name, _headings(html), folded=len(parts) > LONG) for anchor, name, html in parts]
    return "<nav>\n<p>Contents</p>\n<ol>\n" + "\n".join(items) + "\n</ol>\n</nav>"


def _headings(html: str) -> list[tuple[str, str]]:
    # Sanitized HTML has no `<` that is not a tag's, so what is left of a heading is escaped text.
    return [(anchor, " ".join(_TAG.sub("", text).split())) for _, anchor, text in _HEADING.findall(html)]


def _item(anchor: str, name: str, headings: Sequence[tuple[str, str]], *, folded: bool) -> str:
    link = f'<a href="#{anchor}">{escape(name)}</a>'
    if not headings:
        return f"<li>{link}</li>"
    lines = "".join(f'<li><a href="#{place}">{text}</a></li>' for place, text in headings)
    inner = f"<details><summary>{len(headings)} sections</summary><ul>{lines}</ul></details>" if folded else ""
    return f"<li>{link}{inner or f'<ul>{lines}</ul>'}</li>"
