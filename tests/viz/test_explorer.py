"""The tree explorer without a browser: its traits, what it sends, its static twin."""

import json
import threading

import pytest
from matplotlib.colors import to_rgb
from traitlets import TraitError

from kdlab.errors import ArgumentError
from kdlab.viz import TreeExplorer, plot_draft_tree
from kdlab.viz.trees import ACCEPTED, BONUS
from tests.viz.samples import TOKENIZER, Words, branched_record, make_record, make_run


def explorer():
    second = [make_record("<q", [-1, 0], (0, 1), "z", index=0, prompt=1)]
    outputs = [[ord(char) for char in "abyzx"], [ord(char) for char in "<qz"]]
    first = [branched_record(), make_record("zq", [-1, 0], (0,), "x", index=1)]
    return TreeExplorer(make_run([first, second], outputs), TOKENIZER)


def test_the_view_holds_the_round_and_goes_through_json():
    view = explorer().view
    assert json.loads(json.dumps(view, allow_nan=False)) == view
    assert [node["text"] for node in view["nodes"]] == list("abxcyz")
    assert (view["path"], view["largest"], view["rounds"]) == ([0, 1, 4], 4, 2)
    assert view["nodes"][5]["parent"] == 4
    assert (view["before"], view["spoken"]) == ("<b>hi ", ["a", "b", "y", "z"])


def test_a_node_says_rank_probabilities_and_what_the_target_wanted():
    nodes = explorer().view["nodes"]
    child, grandchild = nodes[1], nodes[4]
    assert child["rank"] == 0
    assert grandchild["rank"] == 1
    assert grandchild["path"] == pytest.approx(child["path"] * grandchild["own"])
    assert child["wants"] == "!"


def test_round_and_prompt_change_the_view_and_another_prompt_begins_at_its_first_round():
    shown = explorer()
    shown.round = 1
    assert [node["text"] for node in shown.view["nodes"]] == list("zqx")
    assert shown.view["before"] == "<b>hi aby"
    for start in (0, 1):
        shown.prompt, shown.round = 0, start
        shown.prompt = 1
        assert (shown.round, shown.view["prompt"], shown.view["round"]) == (0, 1, 0)
        assert shown.record.prompt == 1


def test_a_view_is_made_once_for_both_and_the_budget_needs_none():
    shown, views = explorer(), []
    shown.observe(lambda change: views.append(change["new"]), names="view")
    shown.set_state({"prompt": 1, "round": 0})
    assert len(views) == 1
    shown.budget = 2
    assert len(views) == 1


@pytest.mark.parametrize(("name", "value"), [("round", 2), ("round", -1), ("prompt", 2), ("budget", 5), ("budget", -1)])
def test_places_that_do_not_exist_are_refused_and_leave_everything_as_it_was(name, value):
    shown = explorer()
    before = (shown.prompt, shown.round, shown.budget, shown.view)
    with pytest.raises(TraitError, match=name):
        setattr(shown, name, value)
    assert (shown.prompt, shown.round, shown.budget, shown.view) == before


def test_a_worker_thread_may_move_it():
    shown = explorer()
    worker = threading.Thread(target=shown.set_trait, args=("round", 1))
    worker.start()
    worker.join()
    assert shown.view["round"] == 1


def test_markup_in_tokens_and_prompts_is_sent_as_the_text_it_is():
    words = Words(["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"&'] + ["x"] * 125)
    record = make_record([0, 1], [-1, 0], (0, 1), 2)
    view = TreeExplorer(make_run([[record]], [[0, 1, 2]]), words).view
    assert view["spoken"] == words.words[:3]
    assert [node["text"] for node in view["nodes"]] == words.words[:3]


def test_scores_that_are_not_finite_can_be_sent():
    record = make_record("ab", [-1, 0], (0,), "z", logp=[0.0, -float("inf")])
    record.target_tokens[1] = -1
    view = TreeExplorer(make_run([[record]], [[97, 122]]), TOKENIZER).view
    json.dumps(view, allow_nan=False)
    assert "not finite" in view["nodes"][1]["wants"]
    assert view["nodes"][1]["own"] == 0.0


def test_runs_without_rounds_and_trees_in_another_order_are_refused():
    with pytest.raises(ArgumentError, match="round"):
        TreeExplorer(make_run([[]], [[97]]), TOKENIZER)
    record = make_record("abc", [-1, 0, 0], (0,), "z", logp=[0.0, -2.0, -1.0])
    with pytest.raises(ArgumentError, match="log-probability"):
        TreeExplorer(make_run([[record]], [[97, 122]]), TOKENIZER)


def outlines(ax):
    boxes = [text for text in ax.texts if text.get_bbox_patch()]
    return {text.get_text(): text.get_bbox_patch().get_edgecolor()[:3] for text in boxes}


def test_the_static_twin_greys_what_the_budget_drops_and_marks_what_the_target_wanted_there():
    shown = explorer()
    assert outlines(shown.static()) == outlines(plot_draft_tree(shown.record, TOKENIZER))
    shown.budget = 3
    drawn = outlines(shown.static())
    assert set(drawn) == set("abxcy")
    assert drawn["b"] == to_rgb(ACCEPTED)
    assert drawn["y"] == to_rgb(BONUS)
    assert "with a budget of 3: 1 of 3 accepted" in shown.static().get_title(loc="left")
    shown.budget = 0
    drawn = outlines(shown.static())
    assert drawn["b"] == to_rgb(BONUS)
    assert drawn["x"] == drawn["c"] == drawn["y"] not in (to_rgb(ACCEPTED), to_rgb(BONUS))
