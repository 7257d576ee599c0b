"""The conclusions of executed notebooks: what a reader of the report, or of the terminal, should know first."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kdlab.errors import ArgumentError

CONCLUSION = "conclusion"
"""The key of a result record that holds one sentence or a list of them."""


def conclusions(record: Mapping[str, Any]) -> list[str]:
    """Return the sentences that a result record concludes with; none where it does not say.

    Raises:
        ArgumentError: its conclusion is neither text nor a list of texts.
    """
    value = record.get(CONCLUSION)
    sentences = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(sentences, list | tuple) or not all(isinstance(sentence, str) for sentence in sentences):
        raise ArgumentError(f"record[{CONCLUSION!r}]", "text or a list of texts", repr(value))
    return list(sentences)


def render_summary(records: Sequence[tuple[str, str, Mapping[str, Any]]]) -> str:
    """Return the box of conclusions.

    Args:
        records: (notebook name, anchor of its part, result record).

    Returns:
        A `<div>` with one list a notebook, or nothing where no notebook concludes.
    """
    parts = []
    for name, anchor, record in records:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in conclusions(record))
        if items:
            parts.append(f'<p><a href="#{anchor}">{escape(name)}</a></p>\n<ul>{items}</ul>')
    return '<div class="summary">\n' + "\n".join(parts) + "\n</div>" if parts else ""


def render_unfinished(problems: Mapping[str, str]) -> str:
    """Return the box that names the notebooks which are missing because they did not finish, or nothing."""
    items = "".join(f"<li>{escape(name)}: {escape(problem)}</li>" for name, problem in problems.items())
    return f'<div class="summary">\n<p>Did not finish, and is not shown:</p>\n<ul>{items}</ul>\n</div>' if items else ""
