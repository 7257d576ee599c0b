"""Places of a page that are written from recorded files, so that no number is typed.

A place lies between `<!-- TOPIC: NAME -->` and `<!-- end -->`, on lines of their own.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kdlab.errors import ArgumentError


def fill_places(text: str, topic: str, makers: Mapping[str, Callable[[], str]]) -> str:
    """Return a page's text with every place of a topic written anew.

    Args:
        text: of the page.
        topic: of the places; those of others stay as they are.
        makers: what makes the text of a place, by its name.

    Raises:
        ArgumentError: a place has an unknown name.
    """

    def written(place: re.Match[str]) -> str:
        name = place[1]
        if name not in makers:
            raise ArgumentError("place", f"one of {', '.join(makers)}", name)
        return f"<!-- {topic}: {name} -->\n{makers[name]()}\n<!-- end -->"

    pattern = rf"^<!-- {re.escape(topic)}: (\w+) -->\n.*?^<!-- end -->$"
    return re.sub(pattern, written, text, flags=re.MULTILINE | re.DOTALL)


def write_pages(fill: Callable[[str], str], pages: Iterable[Path]) -> None:
    """Fill every page whose text changes by it, and print a line a page."""
    for path in pages:
        old = path.read_text(encoding="utf-8")
        new = fill(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
        print(f"{path}: {'written' if new != old else 'as it was'}")


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    rule = "|".join("---" for _ in header)
    return "\n".join([f"| {' | '.join(header)} |", f"|{rule}|", *(f"| {' | '.join(line)} |" for line in lines)])
