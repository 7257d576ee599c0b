"""Notebook 20 in JupyterLab in a real browser: run it, move the sliders, type the keys, look at what is there."""

import io
import json
import time

import numpy as np
import pytest
from PIL import Image

import kdlab
from kdlab.viz.round_drawing import arrange
from tests.browser.jupyter_lab import MILLISECONDS, ROOT, cut_notebook, open_notebook

NOTEBOOK = ROOT / "notebooks" / "20_draft_trees.ipynb"
CELLS = ("parameters", "setup", "settings", "explorer", "depth")
# A prompt that would change the page's title if it ever became markup.
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> if x < 3:"
# The theme's name changes before its colours do.
IS_DARK = """() => {
    const red = /\\d+/.exec(getComputedStyle(document.querySelector('.kdlab-tree')).backgroundColor);
    return document.body.dataset.jpThemeLight === 'false' && Number(red) < 64;
}"""
ACCEPTED_RGB = (0xD5, 0x5E, 0x00)


def shortened(folder):
    """Write the notebook's own explorer cells with a small run; its second file of prompts is hostile."""
    prompts = folder / "hostile.jsonl"
    prompts.write_text(json.dumps({"id": "hostile", "kind": "<b>bold</b>", "text": HOSTILE}) + "\n")
    return cut_notebook(NOTEBOOK, CELLS, folder, {"smoke": True, "prompts": ["code", str(prompts)]})


class Explorer:
    """The tree explorer on a page, and what the recorded rounds say it must show."""

    def __init__(self, page, run, tokenizer, errors):
        self.page, self.run, self.tokenizer, self.errors = page, run, tokenizer, errors
        self.root = page.locator(".kdlab-tree")

    def slider(self, name):
        return self.root.locator(f"input[aria-label='{name}']")

    def rows(self, state):
        nodes = self.root.locator(f".kdlab-node[data-state='{state}']:visible")
        return sorted(nodes.evaluate_all("nodes => nodes.map((node) => Number(node.dataset.row))"))

    def press(self, key):
        self.root.focus()
        self.page.keyboard.press(key)

    def check(self, prompt, index, budget):
        """Wait until this round is drawn, then compare marks and numbers with the recorded round."""
        from playwright.sync_api import expect

        record = self.run.rounds[prompt][index]
        drawing = arrange(record, self.tokenizer, budget)
        expect(self.root.locator(f"svg[aria-label='draft tree of round {index}']")).to_be_visible(timeout=MILLISECONDS)
        labels = [label if len(label) <= 12 else label[:11] + "…" for label in drawing.labels]
        expect(self.root.locator(".kdlab-node text")).to_have_text(labels, timeout=MILLISECONDS)
        drafted, verified = drawing.num_kept - 1, drawing.bonus - 1
        said = f"{len(drawing.path) - 1} of {drafted}"
        if drafted < verified:
            said += f" ({len(record.path) - 1} of {verified} verified)"
        expect(self.root.locator(".kdlab-numbers .kdlab-fact").first).to_have_text(said, timeout=MILLISECONDS)
        assert self.rows("accepted") == list(drawing.path)
        assert self.rows("wanted") == [drawing.wanted]


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    with open_notebook(shortened(folder), folder) as (page, errors):
        page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
        page.locator(".jp-OutputArea-output", has_text="cells done").wait_for(timeout=2 * MILLISECONDS)
        run = kdlab.load_run(folder / "20_rounds.parquet")
        yield Explorer(page, run, kdlab.load_pair("bundled").tokenizer, errors)


def number(explorer, name):
    return int(explorer.slider(name).input_value())


def test_the_accepted_path_is_there_and_the_keys_move_round_and_budget(explorer):
    explorer.root.scroll_into_view_if_needed()
    index, budget = number(explorer, "round"), number(explorer, "budget")
    explorer.check(0, index, budget)
    step = "ArrowRight" if index == 0 else "ArrowLeft"
    index += 1 if index == 0 else -1
    explorer.press(step)
    explorer.check(0, index, budget)
    explorer.press("ArrowUp")
    explorer.check(0, index, budget + 1)
    for _ in range(6):
        explorer.press("Shift+ArrowUp")
    explorer.check(0, index, 31)
    assert explorer.rows("dropped") == []
    for _ in range(6):
        explorer.press("Shift+ArrowDown")
    explorer.check(0, index, 0)
    assert explorer.rows("accepted") == [0]


def test_the_sliders_move_and_a_node_says_what_it_is(explorer):
    last = len(explorer.run.rounds[0]) - 1
    bar = explorer.slider("round").bounding_box()
    explorer.page.mouse.move(bar["x"] + 3, bar["y"] + bar["height"] / 2)
    explorer.page.mouse.down()
    explorer.page.mouse.move(bar["x"] + bar["width"] - 1, bar["y"] + bar["height"] / 2, steps=8)
    explorer.page.mouse.up()
    explorer.slider("budget").fill("31")
    explorer.check(0, last, 31)
    explorer.root.locator("[data-row='1']").hover()
    facts = explorer.root.locator(".kdlab-facts").inner_text()
    assert "depth, rank" in facts
    assert "1, 0 (0 = the draft's best)" in facts


def test_a_prompt_of_markup_is_text(explorer):
    explorer.press("PageDown")
    explorer.check(1, 0, 31)
    assert "<img src=x" in explorer.root.locator(".kdlab-value").first.inner_text()
    assert HOSTILE in explorer.root.locator(".kdlab-text").inner_text()
    assert explorer.root.locator("img, script").count() == 0
    assert explorer.page.title() != "owned"
    explorer.press("PageUp")
    explorer.check(0, 0, 31)


def pixels_near(explorer, colour):
    picture = Image.open(io.BytesIO(explorer.root.locator(".kdlab-canvas").screenshot())).convert("RGB")
    return int((np.abs(np.asarray(picture, dtype=int) - colour).max(axis=-1) < 30).sum())


def test_a_screenshot_shows_the_path_and_the_dark_theme_is_dark(explorer):
    assert pixels_near(explorer, ACCEPTED_RGB) > 100
    change = "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
    explorer.page.evaluate(change, "JupyterLab Dark")
    explorer.page.wait_for_function(IS_DARK, timeout=MILLISECONDS)
    late = time.monotonic() + MILLISECONDS / 1000
    while pixels_near(explorer, (0xF0, 0x89, 0x4A)) <= 100 and time.monotonic() < late:
        time.sleep(0.1)  # the theme is set before it is painted
    assert pixels_near(explorer, (0xF0, 0x89, 0x4A)) > 100
    assert pixels_near(explorer, (0xFF, 0xFF, 0xFF)) < pixels_near(explorer, (0x11, 0x11, 0x11))


def test_the_acceptance_explorer_draws_in_place(explorer):
    from playwright.sync_api import expect

    page = explorer.page
    figure = page.locator("img.kdlab-figure")
    assert "Acceptance by depth (budget 31)" in figure.get_attribute("alt")
    page.locator(".widget-toggle-button", has_text="after a sibling").click()
    question = "Does the draft hold off its own best path?"
    expect(figure).to_have_attribute("alt", f"{question} (budget 31)", timeout=MILLISECONDS)
    page.locator(".widget-slider .noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    expect(figure).to_have_attribute("alt", f"{question} (budget 32)", timeout=MILLISECONDS)
    assert figure.evaluate("image => image.complete && image.naturalWidth > 300")
    assert figure.count() == 1


def test_the_page_reported_no_error(explorer):
    assert explorer.errors == []
