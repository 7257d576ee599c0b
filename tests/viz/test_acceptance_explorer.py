"""The acceptance explorer and the figure of accepted siblings, driven by their traits."""

import dataclasses
import threading

import pandas as pd
import pytest

from kdlab import study
from kdlab.decode import DraftField
from kdlab.errors import ArgumentError
from kdlab.viz import AcceptanceExplorer, plot_after_sibling, sibling_findings

FIGURES = ["by depth", "by rank", "after a sibling", "calibration", "missed mass"]
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def explorer(field):
    return AcceptanceExplorer(field, 7)


def test_every_figure_is_drawn_in_place_with_its_words(explorer):
    image, seen = explorer.drawing, set()
    assert list(explorer.figure.options) == FIGURES
    for name in FIGURES:
        explorer.figure.value = name
        assert explorer.drawing is image
        assert image.png.startswith(PNG)
        assert image.words in explorer.words.value.replace("&#x27;", "'")
        seen.add(image.png)
    assert len(seen) == len(FIGURES)


def test_budget_and_kind_change_the_numbers(field):
    explorer = AcceptanceExplorer(field, 1)
    low = explorer.table()["num_accepted"].sum()
    explorer.budget.value = 16
    assert explorer.table()["num_accepted"].sum() > low
    whole = explorer.table()["num_rounds"].iloc[0]
    explorer.kind.value = "sums"
    assert "budget 16, sums" in explorer.drawing.words
    assert "3 prompts" in explorer.words.value
    sums = [prompt for prompt in field.prompts if prompt.kind == "sums"]
    alone = DraftField(sums, field.top_k, field.vocab_size, field.depth_limit, field.provenance)
    pd.testing.assert_frame_equal(explorer.table(), study.acceptance_by_depth(alone, 16))
    assert explorer.table()["num_rounds"].iloc[0] < whole


def test_the_static_twin_is_the_figure_on_show(explorer):
    explorer.figure.value = "after a sibling"
    ax = explorer.static()
    assert ax.get_title(loc="left") == explorer.drawing.words
    assert "depth" in ax.get_xlabel()


def test_a_worker_thread_may_move_it(field):
    explorer = AcceptanceExplorer(field, 3)
    before = explorer.drawing.png
    worker = threading.Thread(target=explorer.budget.set_trait, args=("value", 9))
    worker.start()
    worker.join()
    assert explorer.drawing.png != before
    assert "budget 9" in explorer.words.value


def test_kinds_are_text_and_not_markup(field):
    prompts = [dataclasses.replace(prompt, kind="<img src=x>") for prompt in field.prompts]
    explorer = AcceptanceExplorer(DraftField(prompts, field.top_k, field.vocab_size, field.depth_limit, {}), 3)
    explorer.kind.value = "<img src=x>"
    assert "&lt;img" in explorer.words.value
    assert "<img" not in explorer.words.value


def test_no_prompt_and_budgets_beyond_the_candidates_are_refused(field):
    with pytest.raises(ArgumentError, match="budget"):
        AcceptanceExplorer(field, field.top_k + 1)
    with pytest.raises(ArgumentError, match="prompt"):
        AcceptanceExplorer(DraftField([], 4, 8, 3, {}), 3)


def sibling_table(hits_after):
    rows = [(2, "top path", 100, 80, 0.8), (2, "sibling just before", 100, hits_after, 0.5)]
    rows.append((2, "sibling earlier", 0, 0, float("nan")))
    table = pd.DataFrame(rows, columns=["depth", "prefix", "num_positions", "hits", "predicted"])
    return table.assign(observed=table["hits"] / table["num_positions"])


def test_observed_is_full_predicted_hollow_and_empty_groups_are_left_out():
    ax = plot_after_sibling(sibling_table(30), provenance={"device": "cpu", "git_commit": "0123456789ab"})
    full, hollow = ax.collections[1], ax.collections[2]
    assert [float(marks.get_offsets()[0][1]) for marks in (full, hollow)] == [0.8, 0.8]
    assert hollow.get_facecolor()[0][:3].tolist() == [1.0, 1.0, 1.0]
    assert [float(marks.get_offsets()[0][1]) for marks in ax.collections[4:6]] == [0.3, 0.5]
    assert ax.get_legend().get_texts()[2].get_text() == "later after a sibling, 0 positions"
    assert any("commit 012345678" in text.get_text() for text in ax.texts)


@pytest.mark.parametrize(("hits", "holds"), [(30, "outside"), (52, "within")])
def test_the_findings_say_whether_the_draft_holds(hits, holds):
    along, after, later = sibling_findings(sibling_table(hits)).split("\n")
    assert f"**{hits}.0%**" in after
    assert f"{hits - 50:+.1f} points, {holds}" in after
    assert "+0.0 points, within" in along
    assert later == "- Later after a sibling: no position."
