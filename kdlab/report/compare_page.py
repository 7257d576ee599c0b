"""The report of two named runs compared: figure, table, sentences and the provenance of both."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from kdlab.report.compare import RunComparison
from kdlab.report.done_marker import write_whole
from kdlab.report.page import document, inputs_digest
from kdlab.report.provenance_table import provenance_tables
from kdlab.report.show import DPI
from kdlab.report.vectors import pack_vectors, unpack_vectors

FIGURE = "comparison"
NOTES = (
    "The runs did not take turns: a drift of the machine between them counts as a change.",
    "A value is the median over a prompt's own samples; medians and changes are over prompts. Intervals are 95 % "
    "bootstraps over prompts, and none is given below 5 of them.",
    "p is that of the sign test over prompts, two-sided, adjusted for the number of rows (Holm). A change is called "
    "one where p is at most 0.05 and the interval does not hold zero.",
)


def build_comparison(comparison: RunComparison, html: str | Path, figures: str | Path) -> list[Path]:
    """Write a comparison as one HTML file that needs nothing else, and its figure as PNG, SVG and PDF.

    Args:
        comparison: from `compare_runs`.
        html: the file to write; its folder is made when missing.
        figures: folder of the figure's files.

    Returns:
        The report, then the figure's files.

    Raises:
        KdlabError: the packages of the extra `report` are not installed.
        OSError: a file cannot be written.
    """
    from kdlab.viz import png_bytes
    from kdlab.viz.paired import plot_paired

    provenance = comparison.provenances[0][2]
    names = {"first": comparison.first, "second": comparison.second}
    drawing = plot_paired(comparison.table, **names, provenance=provenance)
    png = png_bytes(drawing, DPI)
    forms = {"png": png} | unpack_vectors(pack_vectors(drawing))
    files = {Path(figures) / f"{FIGURE}.{form}": content for form, content in forms.items()}
    for path, content in files.items():
        write_whole(path, content)
    title = f"{comparison.first} against {comparison.second}"
    facts = repr((comparison.about, comparison.provenances, comparison.unmatched))
    digest = inputs_digest([title, comparison.table.to_json(), facts])
    write_whole(Path(html), document(title, digest, _body(comparison, title, png)))
    return [Path(html), *files]


def comparison_rows(comparison: RunComparison) -> list[dict[str, Any]]:
    """Return the table of a comparison as people read it: a dictionary a row, columns in their order."""
    from kdlab.viz.paired import METRICS, is_change, paired_name

    first, second = f"median, {comparison.first}", f"median, {comparison.second}"
    return [
        {
            "arm": paired_name(row), "of": METRICS.get(row["metric"], row["metric"]), "unit": row["unit"],
            "prompts": row["num_prompts"], first: row["median_first"], second: row["median_second"],
            "change": row["change"], "low": row["change_low"], "high": row["change_high"],
            "higher on": row["higher"], "lower on": row["lower"], "p": row["p_adjusted"],
            "shown": "simulated" if row["simulated"] else "yes" if is_change(row) else "no",
        }
        for row in comparison.table.to_dict("records")
    ]  # fmt: skip


def _body(comparison: RunComparison, title: str, png: bytes) -> str:
    from kdlab.viz.paired import paired_sentences

    about = ", ".join(comparison.about) or "nothing but the code and the time of the runs"
    image = base64.b64encode(png).decode()
    parts = [
        f"<header><h1>{escape(title)}</h1>\n<p>May differ: {escape(about)}.</p></header>",
        f'<div class="summary">{_list(paired_sentences(comparison.table))}</div>',
        f'<section id="comparison">\n<img alt="{escape(title)}" src="data:image/png;base64,{image}">',
        *_tables(comparison),
        _list(NOTES),
        f"<p>Not compared:</p>{_list(comparison.unmatched)}" if comparison.unmatched else "",
        '</section>\n<section id="provenance">\n<h1>Provenance</h1>',
        *(_provenance(comparison, *pair) for pair in comparison.provenances),
        "</section>",
    ]
    return "\n".join(parts)


def _tables(comparison: RunComparison) -> list[str]:
    """Return a heading and a table for each metric."""
    from kdlab.viz import percent

    table = pd.DataFrame(comparison_rows(comparison))
    parts = []
    for (metric, unit), rows in table.groupby(["of", "unit"], sort=False):
        for name in ("change", "low", "high"):
            rows = rows.assign(**{name: [percent(value) if pd.notna(value) else "-" for value in rows[name]]})
        html = rows.drop(columns=["of", "unit"]).round(4).to_html(index=False, border=0)
        parts.append(f"<h2>{escape(f'{metric}, {unit}')}</h2>\n<div>{html}</div>")
    return parts


def _list(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _provenance(comparison: RunComparison, name: str, first: dict[str, Any], second: dict[str, Any]) -> str:
    tables = provenance_tables([(comparison.first, first), (comparison.second, second)])
    return f"<h2>{escape(name)}</h2>\n{tables}"
