"""Notebook and parameters in, executed notebook, figures and one HTML report out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kdlab.report.build import build_report
from kdlab.report.figures import export_figures
from kdlab.report.named import NamedRun, check_complete, find_run
from kdlab.report.notebook_file import read_notebook, read_notebook_json
from kdlab.report.outcome import RESULT_MIME, Outcome, last_problem, read_outcome, record_tables, show_result
from kdlab.report.params import Parameter, bind_parameters, declared_parameters
from kdlab.report.pdf import print_pdf
from kdlab.report.runner import NotebookRun, run_notebook
from kdlab.report.show import show_figure
from kdlab.report.summary import conclusions

if TYPE_CHECKING:
    from kdlab.report.compare import RunComparison, compare_runs
    from kdlab.report.compare_page import build_comparison
    from kdlab.report.grid import GridRun, run_grid
    from kdlab.report.recorded import check_one_document, recorded_files

# Tables and torch, which a run that has nothing to do would wait for.
_LATER = {
    "GridRun": "grid",
    "RunComparison": "compare",
    "build_comparison": "compare_page",
    "check_one_document": "recorded",
    "compare_runs": "compare",
    "recorded_files": "recorded",
    "run_grid": "grid",
}

__all__ = [
    "RESULT_MIME",
    "GridRun",
    "NamedRun",
    "NotebookRun",
    "Outcome",
    "Parameter",
    "RunComparison",
    "bind_parameters",
    "build_comparison",
    "build_report",
    "check_complete",
    "check_one_document",
    "compare_runs",
    "conclusions",
    "declared_parameters",
    "export_figures",
    "find_run",
    "last_problem",
    "print_pdf",
    "read_notebook",
    "read_notebook_json",
    "read_outcome",
    "record_tables",
    "recorded_files",
    "run_grid",
    "run_notebook",
    "show_figure",
    "show_result",
]


def __getattr__(name: str) -> Any:
    """Load what needs tables and torch when it is asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
