"""The provenance of executed notebooks as HTML: where each result record comes from, one column a notebook."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kdlab.report.summary import CONCLUSION

_TEXT = "What each notebook said of its own run, and what it was given; a fact that nobody knows is left empty."


def render_provenance(records: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Return the provenance section.

    Args:
        records: (notebook name, result record, facts about the run that are not in it); what a record holds under
            `provenance` is shown, and its other plain values; tables and conclusions are above already.

    Returns:
        A `<section>`: one table of one notebook; of more a table of what is the same in all, and one of the rest.
    """
    tables = provenance_tables([(name, dict(run) | _facts(record)) for name, record, run in records])
    return f'<section id="provenance">\n<h1>Provenance</h1>\n<p>{_TEXT}</p>\n{tables}\n</section>'


def provenance_tables(columns: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return facts as HTML tables, what is the same in all columns apart from what is not.

    Args:
        columns: (name, facts) of each.
    """
    names = list(dict.fromkeys(fact for _, facts in columns for fact in facts))
    values = {name: [_cell(facts.get(name)) for _, facts in columns] for name in names}
    heads = [name for name, _ in columns]
    if len(columns) == 1:
        return _table(heads, values)
    same = {name: cells[:1] for name, cells in values.items() if len(set(cells)) == 1}
    other = {name: cells for name, cells in values.items() if name not in same}
    return _table(["the same in all"], same) + "\n" + _table(heads, other)


def _table(heads: Sequence[str], values: Mapping[str, Sequence[str]]) -> str:
    if not values:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    rows = "\n".join(
        f"<tr><th>{escape(name)}</th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        for name, cells in values.items()
    )
    return f"<div><table>\n<thead><tr><th></th>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>"


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
