"""What of a notebook's HTML a report keeps: the allow-lists, and nh3 (Rust's ammonia) that holds HTML to them.

Nothing that is kept can run, load or leave the page: pictures only as PNG or JPEG in the page itself, links only to
headings of the same notebook, styles only by properties that cannot name a file.
"""

import re

TAGS = {
    "a", "abbr", "b", "blockquote", "br", "caption", "code", "col", "colgroup", "dd", "del", "details", "div", "dl",
    "dt", "em", "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img", "ins", "kbd", "li",
    "mark", "ol", "p", "pre", "s", "small", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "tfoot",
    "th", "thead", "tr", "u", "ul", "var",
}  # fmt: skip
# Their content is no text for a reader, so it goes with them; of any other tag that is not listed the text stays.
DROPPED = {"iframe", "math", "noscript", "object", "script", "style", "svg", "template", "textarea", "title"}
HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
ATTRIBUTES = {
    "*": {"style", "title"},
    **{heading: {"id"} for heading in HEADINGS},
    "a": {"href"},
    "img": {"src", "alt", "width", "height"},
    "td": {"colspan", "rowspan"},
    "th": {"colspan", "rowspan", "scope"},
    "ol": {"start"},
    "details": {"open"},
}
STYLES = {
    "background-color", "border", "border-bottom", "border-collapse", "border-left", "border-radius", "border-right",
    "border-top", "color", "display", "font-family", "font-size", "font-style", "font-weight", "height", "line-height",
    "margin", "margin-bottom", "margin-left", "margin-right", "margin-top", "max-width", "min-width", "opacity",
    "overflow-wrap", "padding", "padding-bottom", "padding-left", "padding-right", "padding-top", "text-align",
    "text-decoration", "vertical-align", "white-space", "width", "word-break",
}  # fmt: skip
# A colour, a size or a font's name needs none of these, an address does; browsers would ignore it, but why keep it.
ADDRESS_MARKS = {"/", "\\"}
IMAGE = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=\s]+")


def sanitize_html(html: str, id_prefix: str = "") -> str:
    """Return `html` with nothing but what the lists of this module name, every tag closed.

    Args:
        html: a piece of HTML from anywhere.
        id_prefix: put before the headings' ids and the links to them, so that two notebooks of one page do not clash.

    Returns:
        HTML that may stand inside any block of a page.
    """
    import nh3

    def check(tag: str, attribute: str, value: str) -> str | None:
        if attribute == "id":
            return id_prefix + value
        if attribute == "href":
            return f"#{id_prefix}{value[1:]}" if value.startswith("#") else None
        if attribute == "src":
            return value if IMAGE.fullmatch(value) else None
        if attribute == "style":
            return value if ADDRESS_MARKS.isdisjoint(value) else None
        return value

    return nh3.clean(
        html,
        tags=TAGS,
        clean_content_tags=DROPPED,
        attributes=ATTRIBUTES,
        attribute_filter=check,
        link_rel=None,
        url_schemes={"data"},
        filter_style_properties=STYLES,
    )
