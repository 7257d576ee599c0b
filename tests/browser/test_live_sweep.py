"""The live sweep in JupyterLab in a real browser: the number changes, Stop is heard, what was there is kept."""

import json
import re

import nbformat
import pytest

from kdlab.report import read_notebook
from tests.browser.jupyter_lab import MILLISECONDS, open_notebook
from tests.browser.test_explorers import NOTEBOOK

SETUP = """\
import torch
import kdlab
from kdlab import study, viz

torch.set_num_threads(1)
pair = kdlab.load_pair("tiny")
prompts = kdlab.load_prompts(kdlab.paths.REPOSITORY / "data/prompts/tiny.jsonl")
arms = [("ar", 0), ("chain", 3), ("ddtree", 7)]

def sweep():
    return viz.LiveSweep(study.sweep_live(pair, prompts, arms, max_new_tokens=32), len(prompts)).start()"""
WATCHED = "first = sweep()\nfirst"
# The button has to be heard while the kernel is busy with this cell.
WAITED = "second = sweep()\ndisplay(second)\ntable = await second\nprint('kept', second.state, len(table))"
FAILED = """\
def broken():
    yield study.summarize  # no table
third = viz.LiveSweep(broken(), 5).start()
third"""
RESULT = """\
import json
table = first.wait()
print(json.dumps({"state": first.state, "done": first.done, "prompts": int(table["prompt"].nunique()),
    "summary": len(study.summarize(table, num_resamples=20)), "arms": len(study.check_live(table, table))}))"""

ALIVE = "print('kernel', 'alive')"


class Lab:
    """A notebook on a page; `run` runs the cell of a number and all others stay as they are."""

    def __init__(self, page, errors):
        self.page, self.errors = page, errors

    def run(self, index):
        self.page.evaluate("index => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = index }", index)
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell') }")

    def cell(self, index):
        return self.page.locator(".jp-Cell").nth(index)

    def done(self, index):
        """Wait for the sweep of a cell to say how far it is; return that."""
        words = self.cell(index).locator(".widget-html [role='status']")
        words.wait_for(timeout=MILLISECONDS)
        return int(re.search(r"(\d+) (?:of \d+ )?turns", words.inner_text())[1])

    def until_done(self, index, count):
        said = f"[...document.querySelectorAll('.jp-Cell')[{index}].querySelectorAll('[role=status]')]"
        grown = f"() => {said}.some((words) => Number(/(\\d+) of/.exec(words.innerText)?.[1]) >= {count})"
        self.page.wait_for_function(grown, timeout=MILLISECONDS)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    notebook = folder / "notebook" / "live.ipynb"
    notebook.parent.mkdir()
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, WATCHED, WAITED, FAILED, RESULT, ALIVE)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=read_notebook(NOTEBOOK).metadata), notebook)
    with open_notebook(notebook, folder) as (page, errors):
        opened = Lab(page, errors)
        opened.run(0)
        yield opened


def test_the_number_and_the_curve_change_and_stop_keeps_what_is_there(lab):
    lab.run(1)
    lab.until_done(1, 1)
    figure = lab.cell(1).locator("img.kdlab-figure")
    before = figure.get_attribute("src")
    lab.until_done(1, lab.done(1) + 2)
    lab.cell(1).locator("button", has_text="Stop").click()
    lab.cell(1).locator("[role='status']", has_text="stopped:").wait_for(timeout=MILLISECONDS)
    count = lab.done(1)
    assert 3 <= count < 32
    assert figure.count() == 1
    assert figure.get_attribute("src") != before
    assert figure.get_attribute("alt").startswith(f"Live rounds, {count} of 32 turns")
    assert figure.evaluate("image => image.complete && image.naturalWidth > 300")
    assert lab.cell(1).locator("button", has_text="Stop").is_disabled()
    assert lab.cell(1).locator(".jp-OutputArea-child").count() == 1  # nothing was printed
    lab.run(4)
    printed = lab.cell(4).locator(".jp-OutputArea-output", has_text="state")
    printed.wait_for(timeout=MILLISECONDS)
    kept = json.loads(printed.inner_text())
    assert kept == {"state": "stopped", "done": count, "prompts": count, "summary": 3, "arms": 3}


def test_stop_is_heard_while_a_cell_awaits_it(lab):
    lab.run(2)
    lab.until_done(2, 1)
    lab.cell(2).locator("button", has_text="Stop").click()
    lab.cell(2).locator(".jp-OutputArea-output", has_text="kept stopped").wait_for(timeout=MILLISECONDS)


def test_an_error_is_shown_and_the_kernel_lives(lab):
    lab.run(3)
    lab.cell(3).locator("[role='status']", has_text="failed after").wait_for(timeout=MILLISECONDS)
    assert lab.cell(3).locator(".jp-OutputArea-child").count() == 1
    lab.run(5)
    lab.cell(5).locator(".jp-OutputArea-output", has_text="kernel alive").wait_for(timeout=MILLISECONDS)


def test_the_page_reported_no_error(lab):
    assert lab.errors == []
