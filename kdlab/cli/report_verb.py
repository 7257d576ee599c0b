"""`kdlab report`: of executed notebooks, of a named run, of two named runs compared."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdlab.cli.output import print_json, print_table, say
from kdlab.errors import ArgumentError, NotebookError

_MOST_ROWS = 24  # of a table on a terminal


def run_report(arguments: argparse.Namespace) -> int:
    """Write a report, and print the tables and conclusions of what it is about."""
    words = arguments.notebooks
    if arguments.about and not arguments.compare:
        raise ArgumentError("--about", "--compare beside it", "none")
    if bool(words) == bool(arguments.compare):
        got = " ".join(words) or "none of them"
        raise ArgumentError("report", "executed notebooks, or one named run, or --compare A B", got)
    if arguments.compare:
        return _report_comparison(arguments)
    if len(words) == 1 and not words[0].endswith(".ipynb"):
        return _report_run(arguments, words[0])
    return _report_notebooks(arguments)


def _report_notebooks(arguments: argparse.Namespace) -> int:
    """Report notebooks one by one.

    A notebook that did not finish does not keep the others from the report: it is named there and here, and the status
    says so.
    """
    from kdlab.report import build_report, export_figures, last_problem
    from kdlab.report.build import TITLE

    problems = {path: last_problem(Path(path)) for path in arguments.notebooks}
    finished = [path for path, problem in problems.items() if problem is None]
    unfinished = {path: problem for path, problem in problems.items() if problem is not None}
    said = "; ".join(f"{path} did not finish: {problem}" for path, problem in unfinished.items())
    if not finished:
        raise NotebookError(f"{said}; run it with `kdlab run` first")
    html = Path(arguments.output or "reports/kdlab.html")
    build_report(finished, html, title=arguments.title or TITLE, unfinished=unfinished)
    figures = export_figures(finished, arguments.figures) if arguments.figures else []
    pdf = _print_pdf(html, arguments.pdf or False)
    _print_report(arguments, html, pdf, figures, [Path(path) for path in finished], unfinished)
    if unfinished:
        raise NotebookError(f"not in the report: {said}")
    return 0


def _report_run(arguments: argparse.Namespace, name: str) -> int:
    from kdlab.report import build_report, export_figures, find_run

    run = find_run(name)
    html = Path(arguments.output or Path("reports") / run.name / "report.html")
    _check_complete([run], html)
    folder = Path(arguments.figures or html.parent / "figures")
    paths = [path for point in run.points for path in point.notebooks]
    names = ["/".join(filter(None, (point.name, path.stem))) for point in run.points for path in point.notebooks]
    build_report(paths, html, title=arguments.title or run.name, names=names)
    figures = [path for point in run.points for path in export_figures(point.notebooks, folder / point.name)]
    pdf = _print_pdf(html, arguments.pdf)
    _print_report(arguments, html, pdf, figures, paths, {})
    return 0


def _report_comparison(arguments: argparse.Namespace) -> int:
    from kdlab.report import compare_runs, find_run
    from kdlab.report.compare_page import build_comparison, comparison_rows
    from kdlab.viz import paired_sentences

    runs = [find_run(name) for name in arguments.compare]
    name = "-".join([runs[0].name, "against", runs[1].name])
    html = Path(arguments.output or Path("reports") / name / "report.html")
    _check_complete(runs, html)
    found = compare_runs(*runs, about=arguments.about)
    _, *figures = build_comparison(found, html, arguments.figures or html.parent / "figures")
    pdf = _print_pdf(html, arguments.pdf)
    if arguments.json:
        said = {"about": found.about, "table": found.table.to_dict("records"), "unmatched": found.unmatched}
        print_json({"report": str(html), "pdf": _text(pdf), "figures": list(map(str, figures))} | said)
        return 0
    print_table(comparison_rows(found))
    print()
    print("\n".join([*paired_sentences(found.table), *(f"not compared: {what}" for what in found.unmatched)]))
    _print_places(html, pdf, figures, arguments.figures or html.parent / "figures")
    return 0


def _check_complete(runs: Sequence[Any], html: Path) -> None:
    """Refuse unfinished runs, and say so of a report that is there from before."""
    from kdlab.report import check_complete

    try:
        for run in runs:
            check_complete(run)
    except NotebookError as error:
        earlier = f"; {html} is an earlier report" if html.exists() else ""
        raise NotebookError(f"{error}{earlier}") from error


def _print_pdf(html: Path, wanted: bool | None) -> Path | None:
    """Print the report to PDF: True demands it, None does it where it can be done and says what to do where not."""
    from kdlab.report.pdf import find_browser, next_step, print_pdf

    if wanted is False:
        return None
    if wanted is None and find_browser() is None:
        say(next_step(html))
        return None
    pdf = html.with_suffix(".pdf")
    print_pdf(html, pdf)
    return pdf


def _print_report(
    arguments: argparse.Namespace, html: Path, pdf: Path | None, figures: Sequence[Path], finished: Sequence[Path],
    unfinished: Mapping[str, str],
) -> None:  # fmt: skip
    from kdlab.report import read_notebook_json, read_outcome

    records = [read_outcome(read_notebook_json(path)).record or {} for path in finished]
    if arguments.json:
        print_json({"report": str(html), "pdf": _text(pdf), "figures": list(map(str, figures)), "records": records,
                    "unfinished": unfinished})  # fmt: skip
        return
    _print_records(dict(zip(finished, records, strict=True)))
    _print_places(html, pdf, figures, arguments.figures or html.parent / "figures")


def _print_places(html: Path, pdf: Path | None, figures: Sequence[Path], folder: str | Path) -> None:
    if figures:
        print(f"figures: {len({path.with_suffix('') for path in figures})} in {folder}")
    if pdf:
        print(f"pdf: {pdf.resolve()}")
    print(f"report: {html.resolve()}")


def _print_records(records: Mapping[Path, Mapping[str, Any]]) -> None:
    """Print what each notebook recorded; where there are several, each table says which one's it is."""
    from kdlab.report import conclusions, record_tables

    for path, record in records.items():
        for name, rows in record_tables(record):
            print(f"{path}: {name}:" if len(records) > 1 else f"{name}:")
            print_table(rows[:_MOST_ROWS])
            if len(rows) > _MOST_ROWS:
                print(f"... and {len(rows) - _MOST_ROWS} rows more, which --json prints")
            print()
    # A notebook that reads what others recorded concludes what they did.
    print("\n".join(dict.fromkeys(sentence for record in records.values() for sentence in conclusions(record))))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
