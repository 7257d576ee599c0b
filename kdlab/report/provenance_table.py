"""The provenance of executed notebooks as HTML: where each result record comes from, one column a notebook."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kdlab.report.summary import CONCLUSION


def render_provenance(records: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the provenance section.

    Args:
        records: (notebook name, result record); what a record holds under `provenance` is shown, and its other
            plain values; tables and conclusions are above already.

    Returns:
        A `<section>` with one table.
    """
    columns = [(name, _facts(record)) for name, record in records]
    names = list(dict.fromkeys(fact for _, facts in columns for fact in facts))
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in columns)
    rows = [
        f"<tr><th>{escape(name)}</th>" + "".join(f"<td>{_cell(facts.get(name))}</td>" for _, facts in columns) + "</tr>"
        for name in names
    ]
    table = f"<table>\n<thead><tr><th></th>{head}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table>"
    text = "<p>What each notebook said of its own run; a fact that nobody knows is left empty.</p>"
    return f'<section id="provenance">\n<h1>Provenance</h1>\n{text}\n<div>{table}</div>\n</section>'


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    plain = {
        name: value for name, value in record.items() if name != CONCLUSION and not isinstance(value, Mapping | list)
    }
    provenance = record.get("provenance")
    return plain | (dict(provenance) if isinstance(provenance, Mapping) else {})


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape(text)
