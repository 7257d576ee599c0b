"""The kernel explorer of notebook 30 in JupyterLab in a real browser: menus, keys, pointer, both themes."""

import io

import numpy as np
import pytest
from PIL import Image

from kdlab.bench import read_rows, write_rows
from kdlab.bench.kernels import graph_times, kernel_table
from kdlab.profiling import write_launches
from tests.bench.samples import kernel_rows
from tests.browser.jupyter_lab import MILLISECONDS, ROOT, cut_notebook, open_notebook
from tests.profiling.rounds import profiled

NOTEBOOK = ROOT / "notebooks" / "30_kernels.ipynb"
CELLS = ("parameters", "setup", "measure", "explorer")
WGMMA_LIGHT, WGMMA_DARK = (0x00, 0x72, 0xB2), (0x4A, 0xA8, 0xE0)
IS_DARK = """() => {
    const red = /\\d+/.exec(getComputedStyle(document.querySelector('.kdlab-kernels')).backgroundColor);
    return document.body.dataset.jpThemeLight === 'false' && Number(red) < 64;
}"""


def shortened(folder):
    """Write the notebook's own explorer cells, about made-up rows and counters."""
    paths = {name: folder / f"{name}.parquet" for name in ("recorded", "recorded_launches")}
    write_rows(kernel_rows(), paths["recorded"])
    write_launches(profiled(), paths["recorded_launches"])
    return cut_notebook(NOTEBOOK, CELLS, folder, {name: str(path) for name, path in paths.items()})


class Explorer:
    """The kernel explorer on a page, and the table that it must show."""

    def __init__(self, page, table, errors):
        self.page, self.table, self.errors = page, table, errors
        self.root = page.locator(".kdlab-kernels")

    def press(self, *keys):
        self.root.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def menu(self, name):
        return self.root.locator(f"select[aria-label='{name}']")

    def toggle(self, name):
        return self.root.locator(".kdlab-toggle", has_text=name).first

    def check(self, op, case, hidden=()):
        """Wait for a case to be the chosen one, then compare the table below the lines with the rows."""
        from playwright.sync_api import expect

        own = self.table[(self.table["op"] == op) & (self.table["case"] == case) & ~self.table["impl"].isin(hidden)]
        own = own.sort_values("us")
        cells = self.root.locator(".kdlab-row:not(:first-child) .kdlab-cell")
        number = self.root.locator(".kdlab-row:first-child .kdlab-cell").count
        expect(self.root.locator(".kdlab-heading")).to_contain_text(f"{op}, ", timeout=MILLISECONDS)
        expect(self.root.locator(".kdlab-row")).to_have_count(len(own) + 1, timeout=MILLISECONDS)
        quickest = f"{own['impl'].iloc[0]} is the quickest with {own['us'].iloc[0]:,.0f} µs"
        expect(self.root.locator(".kdlab-heading")).to_contain_text(quickest, timeout=MILLISECONDS)
        shown = np.array(cells.all_inner_texts()).reshape(-1, number())
        assert shown[:, 0].tolist() == own["impl"].tolist()
        assert shown[:, 1].tolist() == [f"{us:,.0f} µs" for us in own["us"]]
        return shown

    def pixels_near(self, colour):
        picture = Image.open(io.BytesIO(self.root.locator(".kdlab-lines").screenshot())).convert("RGB")
        return int((np.abs(np.asarray(picture, dtype=int) - colour).max(axis=-1) < 24).sum())


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    with open_notebook(shortened(folder), folder) as (page, errors):
        page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
        page.locator(".jp-OutputArea-output", has_text="cells done").wait_for(timeout=2 * MILLISECONDS)
        table = graph_times(kernel_table(read_rows(folder / "recorded.parquet")))
        yield Explorer(page, table, errors)


def test_the_chosen_point_is_told_and_the_keys_move_it(explorer):
    from playwright.sync_api import expect

    explorer.root.scroll_into_view_if_needed()
    shown = explorer.check("verify_attention", "S=1 N=33 prefix=4096 H=64")
    wgmma = next(row for row in shown if row[0] == "wgmma")
    assert {"11 MB", "200 MB", "53 %"} <= set(wgmma)  # what Nsight Compute counted of this call
    explorer.press("ArrowLeft")
    explorer.check("verify_attention", "S=1 N=33 prefix=1024 H=64")
    explorer.press("ArrowRight", "x")
    expect(explorer.menu("over")).to_have_value("heads", timeout=MILLISECONDS)
    explorer.check("verify_attention", "S=1 N=33 prefix=4096 H=64")
    explorer.press("ArrowLeft")
    explorer.check("verify_attention", "S=1 N=33 prefix=4096 H=8")
    explorer.press("PageDown")
    explorer.check("draft_topk", "S=1 N=15 V=163840 K=64")
    explorer.press("PageUp")
    explorer.check("verify_attention", "S=1 N=33 prefix=4096 H=64")


def test_digits_and_buttons_hide_arms(explorer):
    assert explorer.toggle("naive").get_attribute("aria-pressed") == "true"
    explorer.press("3")
    explorer.check("verify_attention", "S=1 N=33 prefix=4096 H=64", hidden=["naive"])
    assert explorer.root.locator("[data-arm='naive']").count() == 0
    assert explorer.toggle("naive").get_attribute("aria-pressed") == "false"
    explorer.toggle("naive").click()
    explorer.check("verify_attention", "S=1 N=33 prefix=4096 H=64")


def test_menus_choose_and_the_pointer_takes_a_point(explorer):
    explorer.menu("case").select_option("S=8 N=33 H=8")
    explorer.check("verify_attention", "S=8 N=33 prefix=4096 H=8")
    explorer.menu("op").select_option("tree_build")
    explorer.check("tree_build", "S=1 B=64 L=15 K=64 peaked")
    assert explorer.toggle("host heap (eager)").count() == 1
    explorer.root.locator("g[data-arm='cuda'] [data-point='1']").hover()
    explorer.check("tree_build", "S=1 B=256 L=15 K=64 peaked")
    assert explorer.root.locator(".kdlab-here .kdlab-cell").first.inner_text() == "cuda"
    label = explorer.root.locator("svg[role='img']").get_attribute("aria-label")
    assert label == "tree_build, S=1 L=15 K=64 peaked, budget 256: cuda is the quickest with 14 µs, bound 1.05 µs"
    explorer.menu("op").select_option("verify_attention")
    explorer.check("verify_attention", "S=1 N=33 prefix=4096 H=64")


def test_a_screenshot_shows_the_line_in_both_themes(explorer):
    assert explorer.pixels_near(WGMMA_LIGHT) > 100
    change = "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
    explorer.page.evaluate(change, "JupyterLab Dark")
    explorer.page.wait_for_function(IS_DARK, timeout=MILLISECONDS)
    for _ in range(100):  # the theme is set before it is painted
        if explorer.pixels_near(WGMMA_DARK) > 100:
            break
        explorer.page.wait_for_timeout(100)
    assert explorer.pixels_near(WGMMA_DARK) > 100
    assert explorer.pixels_near((0xFF, 0xFF, 0xFF)) < explorer.pixels_near((0x11, 0x11, 0x11))


def test_the_page_reported_no_error(explorer):
    assert explorer.errors == []
