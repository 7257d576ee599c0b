"""Draft trees on axes: what is drawn, how it is marked, and when labels give way to dots."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from kdlab.errors import ArgumentError
from kdlab.viz import plot_draft_tree, plot_rounds, png_bytes
from kdlab.viz.trees import ACCEPTED, BONUS, LABEL_LIMIT
from tests.viz.samples import TOKENIZER, Words, branched_record, chain_record, make_record


def boxes(ax):
    """The text of every node with its outline colour and its place."""
    found = {}
    for text in ax.texts:
        if text.get_bbox_patch() is not None:
            x, y = text.get_position()
            found[round(x), round(-y)] = (text.get_text(), text.get_bbox_patch().get_edgecolor()[:3])
    return found


def wide_record(num_nodes):
    """A root with `num_nodes` children of which the first is accepted."""
    logp = [0.0] + [-1.0] * num_nodes
    return make_record(list(range(num_nodes + 1)), [-1] + [0] * num_nodes, (0, 1), 99, logp=logp)


def test_path_bonus_and_passed_over_nodes_are_told_apart():
    ax = plot_draft_tree(branched_record(), TOKENIZER)
    drawn = boxes(ax)
    assert {text for text, _ in drawn.values()} == set("abxcyz")
    outline = dict(drawn.values())
    assert outline["b"] == outline["y"] == to_rgb(ACCEPTED)
    assert outline["z"] == to_rgb(BONUS)
    assert outline["x"] == outline["c"] != to_rgb(ACCEPTED)
    assert drawn[(3, 1)][0] == "z"
    assert "2 of 4 accepted" in ax.get_title(loc="left")


def test_the_bonus_stands_below_the_children_that_were_passed_over():
    record = make_record("abc", [-1, 0, 1], (0, 1), "z")
    drawn = boxes(plot_draft_tree(record, TOKENIZER))
    assert drawn[(2, 0)][0] == "c"
    assert drawn[(2, 1)][0] == "z"


def test_fill_follows_the_path_probability():
    record = make_record("abc", [-1, 0, 0], (0,), "z", logp=[0.0, -0.1, -5.0])
    ax = plot_draft_tree(record, TOKENIZER)
    nodes = [text for text in ax.texts if text.get_bbox_patch()]
    fill = {text.get_text(): sum(text.get_bbox_patch().get_facecolor()[:3]) for text in nodes}
    assert fill["b"] < fill["c"]


def test_ar_is_a_root_and_a_bonus():
    ax = plot_draft_tree(make_record("a", [-1], (0,), "b"), TOKENIZER)
    assert {text for text, _ in boxes(ax).values()} == {"a", "b"}
    assert "nothing drafted" in ax.get_title(loc="left")


def test_trees_over_the_limit_are_dots():
    limit = LABEL_LIMIT
    assert len(boxes(plot_draft_tree(wide_record(limit - 1), TOKENIZER))) == limit + 1
    assert boxes(plot_draft_tree(wide_record(limit), TOKENIZER)) == {}


@pytest.mark.parametrize("num_nodes", [1, 7, 16, 33, 64])
def test_labels_of_a_tree_that_fits_do_not_overlap(num_nodes):
    rng = np.random.default_rng(num_nodes)
    parents = [-1] + [int(rng.integers(max(0, row - 12), row)) for row in range(1, num_nodes + 1)]
    logp = [-0.1 * row for row in range(num_nodes + 1)]
    record = make_record(list(range(33, 34 + num_nodes)), parents, (0,), 32, logp=logp)
    words = Words(["␣" + "implementation"[: token % 13 + 1] for token in range(128)])
    for tokenizer in (TOKENIZER, words):
        record_ax = plot_draft_tree(record, tokenizer)
        png_bytes(record_ax, record_ax.figure.dpi)
        boxes = [text.get_bbox_patch().get_window_extent() for text in record_ax.texts if text.get_bbox_patch()]
        assert len(boxes) == num_nodes + 2
        assert not any(one.overlaps(other) for index, one in enumerate(boxes) for other in boxes[:index])


def test_token_text_is_never_taken_for_mathematics_and_never_a_missing_glyph(recwarn):
    record = make_record(list(range(4)), [-1, 0, 0, 0], (0, 1), 0)
    ax = plot_draft_tree(record, Words(["$a$", "\\frac{", "中\u202e", "a_b^c"]))
    png_bytes(ax, 60)
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]
    assert {text for text, _ in boxes(ax).values()} >= {"$a$", "\\frac{", "a_b^c"}


def test_a_given_axes_is_drawn_on_and_a_tight_one_shows_dots():
    ax = Figure(figsize=(1.0, 1.0)).add_subplot()
    assert plot_draft_tree(wide_record(40), TOKENIZER, ax) is ax
    assert boxes(ax) == {}


def test_a_chain_of_1000_nodes_is_drawn():
    assert plot_draft_tree(chain_record(1000), TOKENIZER).lines


def test_small_multiples_share_one_scale():
    records = [branched_record(index=index) for index in range(4)] + [chain_record(6)]
    figure = plot_rounds(records, TOKENIZER, num_columns=3)
    used = [ax for ax in figure.axes if ax.axison]
    assert len(figure.axes) == 6
    assert len(used) == 5
    assert len({ax.get_xlim() for ax in used}) == 1
    with pytest.raises(ArgumentError, match="rounds"):
        plot_rounds([], TOKENIZER)


def test_marks_of_the_legend_have_the_shapes_of_the_nodes():
    (root, drafted, accepted, bonus) = plot_draft_tree(branched_record(), TOKENIZER).get_legend().legend_handles
    assert root.get_marker() == bonus.get_marker() == "s"
    corners = drafted.get_marker().vertices
    assert np.array_equal(corners, accepted.get_marker().vertices)
    dots = plot_draft_tree(wide_record(LABEL_LIMIT), TOKENIZER)
    markers = [line.get_marker() for line in dots.lines if line.get_marker() != "None"]
    assert {marker for marker in markers if isinstance(marker, str)} == {"s"}
    assert any(np.array_equal(marker.vertices, corners) for marker in markers if not isinstance(marker, str))


def test_tokens_of_small_multiples_are_readable_in_a_report_of_900_pixels():
    figure = plot_rounds([branched_record(index=index) for index in range(12)], TOKENIZER)
    figure.draw_without_rendering()
    shown = 900 / 96 / figure.get_figwidth()
    nodes = [text for ax in figure.axes for text in ax.texts]
    headings = [ax.title if ax.title.get_text() else ax._left_title for ax in figure.axes if ax.axison]
    assert len(nodes) == 12 * 6
    assert min(text.get_fontsize() for text in [*nodes, *headings]) * shown > 8.5
