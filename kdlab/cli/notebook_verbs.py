"""`kdlab run` and `kdlab report`."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdlab.cli.output import print_json, print_table, say
from kdlab.errors import NotebookError


def run_run(arguments: argparse.Namespace) -> int:
    """Execute one notebook with parameters, or list the parameters it takes."""
    from kdlab.report import declared_parameters, read_notebook_json, run_notebook
    from kdlab.report.param_text import parse_assignments

    path = Path(arguments.notebook)
    declared = declared_parameters(read_notebook_json(path), path.name) or {}
    if arguments.list:
        rows = [{"name": p.name, "default": p.default, "help": p.help} for p in declared.values()]
        if arguments.json:
            print_json(rows)
        else:
            print_table([row | {"default": repr(row["default"])} for row in rows])
        return 0
    run = run_notebook(
        path,
        parse_assignments(arguments.parameter, declared),
        arguments.output,
        timeout_s=arguments.timeout,
        cell_timeout_s=arguments.cell_timeout,
        skip_done=not arguments.again,
        progress=say,
    )
    if arguments.json:
        print_json(
            {"output": str(run.output), "seconds": run.seconds, "skipped": run.skipped, "record": run.record}
        )
    else:
        state = "finished before, nothing has changed since; it took" if run.skipped else "finished in"
        print(f"{run.output}: {state} {run.seconds:.0f} s")
    return 0


def run_report(arguments: argparse.Namespace) -> int:
    """Write the report of executed notebooks, and print the tables and conclusions of their result records.

    A notebook that did not finish does not keep the others from the report: it is named there and here, and the status
    says so.
    """
    from kdlab.report import build_report, export_figures, last_problem, read_notebook_json, read_outcome

    problems = {path: last_problem(Path(path)) for path in arguments.notebooks}
    finished = [path for path, problem in problems.items() if problem is None]
    unfinished = {path: problem for path, problem in problems.items() if problem is not None}
    said = "; ".join(f"{path} did not finish: {problem}" for path, problem in unfinished.items())
    if not finished:
        raise NotebookError(f"{said}; run it with `kdlab run` first")
    html = build_report(finished, arguments.output, title=arguments.title, unfinished=unfinished)
    figures = export_figures(finished, arguments.figures) if arguments.figures else []
    records = [read_outcome(read_notebook_json(Path(path))).record or {} for path in finished]
    if arguments.json:
        print_json({"report": str(html), "figures": [str(path) for path in figures], "records": records,
                    "unfinished": unfinished})  # fmt: skip
    else:
        _print_records(records)
        if figures:
            print(f"figures: {len(figures)} in {arguments.figures}")
        print(f"report: {html.resolve()}")
    if unfinished:
        raise NotebookError(f"not in the report: {said}")
    return 0


def _print_records(records: Sequence[Mapping[str, Any]]) -> None:
    from kdlab.report import conclusions, record_tables

    for record in records:
        for name, rows in record_tables(record):
            print(f"{name}:")
            print_table(rows)
            print()
    for record in records:
        for sentence in conclusions(record):
            print(sentence)
