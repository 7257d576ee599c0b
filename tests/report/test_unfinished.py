"""Runs that did not finish: named in the report and by the status, while the others are reported."""

import nbformat.v4 as v4
import pytest

from kdlab.cli import main
from kdlab.errors import ArgumentError
from kdlab.report import build_report, last_problem
from tests.report.test_report import finished, save

FAILED = v4.new_code_cell("1", outputs=[v4.new_output("error", ename="E", evalue="<b>")])


def test_a_report_names_what_did_not_finish(tmp_path):
    done = save(finished(v4.new_markdown_cell("# Sweep")), tmp_path, "10_sweep")
    assert last_problem(done) is None
    partial = save(finished(FAILED), tmp_path, "30_kernels.partial")
    problem = last_problem(tmp_path / "30_kernels.ipynb")
    assert "E: <b>" in problem
    assert "earlier run" not in problem
    path = build_report([done], tmp_path / "x.html", unfinished={"30_kernels": problem})
    text = path.read_text()
    assert "30_kernels: cell 1: E: &lt;b&gt;" in text
    assert ">Sweep<" in text
    assert "Did not finish" not in build_report([done], tmp_path / "x.html").read_text()
    save(finished(), tmp_path, "30_kernels")  # from before
    assert "is an earlier run" in last_problem(tmp_path / "30_kernels.ipynb")
    partial.write_text("{")
    assert "cut off" in last_problem(tmp_path / "30_kernels.ipynb")
    with pytest.raises(ArgumentError, match="an existing file"):
        last_problem(tmp_path / "absent.ipynb")


def test_the_command_reports_what_finished_and_fails(tmp_path, capsys):
    done = save(finished(v4.new_markdown_cell("# Sweep")), tmp_path, "10_sweep")
    save(finished(FAILED), tmp_path, "30_kernels.partial")
    html = tmp_path / "x.html"
    command = ["report", str(done), str(tmp_path / "30_kernels.ipynb"), "-o", str(html)]
    assert main(command) == 3
    out, error = capsys.readouterr()
    assert f"report: {html}" in out
    assert "not in the report" in error
    assert "30_kernels.ipynb did not finish: cell 1: E" in error
    assert "Did not finish" in html.read_text()
    (tmp_path / "30_kernels.partial.ipynb").unlink()
    save(finished(), tmp_path, "30_kernels")
    assert main(command) == 0
    assert "Did not finish" not in html.read_text()
