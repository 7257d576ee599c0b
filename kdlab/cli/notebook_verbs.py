"""`kdlab run`."""

import argparse
from pathlib import Path

from kdlab.cli.output import print_json, print_table, say


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
