"""Notebook 40 away from the recorded file: the CPU's own timeline where there is none, and an export of nsys."""

from pathlib import Path

import pytest

from kdlab.report import run_notebook
from tests.profiling import nsys_file

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "40_nsight.ipynb"


@pytest.mark.notebook
def test_where_nothing_is_recorded_one_line_says_so_and_the_cpu_is_drawn(tmp_path):
    parameters = {"recorded": str(tmp_path / "none.parquet"), "rows": 8, "smoke": True, "figures": str(tmp_path)}
    run = run_notebook(NOTEBOOK, parameters, tmp_path / "out.ipynb", timeout_s=300)
    recorded, counted = run.record["messages"]
    assert recorded.startswith("not recorded yet: there is no ")
    assert counted.startswith("nothing was counted of mini, DDTree B=7")
    assert {path.stem for path in tmp_path.glob("*.png")} == {"40_shares", "40_busy", "40_timeline_eager"}
    assert run.record["kernels"] == []
    text = run.output.read_text(encoding="utf-8")
    assert "torch's operations on a CPU, no kernels" in text
    assert text.count("**Not drawn:**") >= 4


@pytest.mark.notebook
def test_an_export_of_nsight_systems_is_drawn_in_place_of_the_recorded_launches(tmp_path):
    export = nsys_file.write(tmp_path / "theirs.sqlite")
    run = run_notebook(NOTEBOOK, {"nsys": str(export), "figures": str(tmp_path)}, tmp_path / "out.ipynb", timeout_s=300)
    assert run.record["conclusion"][0].startswith("Where a round's time goes, on NVIDIA H100: theirs.sqlite, round")
    assert {path.stem for path in tmp_path.glob("*.png")} == {
        "40_shares", "40_busy", "40_timeline_graph", "40_timeline_eager",
    }  # fmt: skip
    assert "imported from theirs.sqlite" in run.output.read_text(encoding="utf-8")
