"""HTML from notebooks made harmless: only known tags and attributes are written again, all text is escaped anew.

The output is built from nothing but the lists below, so what the parser misreads can at worst become visible text.
"""

import re
from html import escape
from html.parser import HTMLParser

TAGS = frozenset(
    {
        "a", "abbr", "b", "blockquote", "br", "caption", "code", "col", "colgroup", "dd", "del", "details", "div",
        "dl", "dt", "em", "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img", "ins",
        "kbd", "li", "mark", "ol", "p", "pre", "s", "small", "span", "strong", "sub", "summary", "sup", "table",
        "tbody", "td", "tfoot", "th", "thead", "tr", "u", "ul", "var",
    }
)
VOID = frozenset({"br", "hr", "img", "col"})
# Their content is no text for a reader, or is read by other rules than ours: it goes with them.
DROPPED = frozenset(
    {
        "applet", "audio", "canvas", "embed", "frame", "frameset", "head", "iframe", "link", "math", "meta",
        "noembed", "noframes", "noscript", "object", "plaintext", "script", "select", "style", "svg", "template",
        "textarea", "title", "video", "xmp",
    }
)
DROPPED_VOID = frozenset({"embed", "frame", "link", "meta"})
ATTRIBUTES = {
    "a": frozenset({"href"}),
    "img": frozenset({"src", "alt", "width", "height"}),
    "td": frozenset({"colspan", "rowspan"}),
    "th": frozenset({"colspan", "rowspan", "scope"}),
    "ol": frozenset({"start"}),
    "details": frozenset({"open"}),
}
EVERYWHERE = frozenset({"title", "style"})
IMAGE = re.compile(r"data:image/(png|jpeg|gif);base64,[A-Za-z0-9+/=\s]*")
ANCHOR = re.compile(r"#[\w.-]*")
STYLE_NAMES = re.compile(
    r"color|background(-color)?|font-(weight|style|size|family)|text-(align|decoration)|white-space|opacity|line-height|"
    r"(min-|max-)?width|(padding|margin)(-(left|right|top|bottom))?|border(-(left|right|top|bottom|radius|color|style|"
    r"width|collapse))?|vertical-align|display|overflow-wrap|word-break"
)
# No quotes, slashes, backslashes or colons: a value can load nothing and end nothing; `rgb(1, 2, 3)` passes.
STYLE_VALUE = re.compile(r"(?is)(?!.*(url|expression|image|attr|var)\s*\()[\w\s#.,%()+-]+")


def sanitize_html(html: str) -> str:
    """Return `html` with only harmless tags, attributes and styles, every tag closed, images only from data URLs."""
    writer = _Writer()
    writer.feed(html)
    writer.close()
    return writer.finish()


class _Writer(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._open: list[str] = []
        self._dropping: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in DROPPED:
            if tag not in DROPPED_VOID:
                self._dropping.append(tag)
        elif tag in TAGS and not self._dropping:
            kept = "".join(_attribute(tag, name, value or "") for name, value in attrs)
            if tag == "img" and " src=" not in kept:
                return
            self._parts.append(f"<{tag}{kept}>")
            if tag not in VOID:
                self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # `<script/>` opens a script in HTML, whatever the slash says.
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if self._dropping:
            if tag in self._dropping:
                while self._dropping.pop() != tag:
                    pass
        elif tag in self._open:
            while True:
                last = self._open.pop()
                self._parts.append(f"</{last}>")
                if last == tag:
                    break

    def handle_data(self, data: str) -> None:
        if not self._dropping:
            self._parts.append(escape(data, quote=False))

    def finish(self) -> str:
        return "".join(self._parts) + "".join(f"</{tag}>" for tag in reversed(self._open))


def _attribute(tag: str, name: str, value: str) -> str:
    if name not in ATTRIBUTES.get(tag, frozenset()) | EVERYWHERE:
        return ""
    if name == "style":
        value = _style(value)
    allowed = {"src": IMAGE, "href": ANCHOR}.get(name)
    if (allowed is not None and not allowed.fullmatch(value)) or (name == "style" and not value):
        return ""
    return f' {name}="{escape(value)}"'


def _style(text: str) -> str:
    kept = []
    for declaration in text.split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if STYLE_NAMES.fullmatch(name.lower()) and STYLE_VALUE.fullmatch(value):
            kept.append(f"{name.lower()}:{value}")
    return ";".join(kept)
