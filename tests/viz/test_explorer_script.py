"""The explorer's JavaScript without a page: the same budgets as the static twin, places that do not overlap, keys."""

import re
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kdlab import viz
from kdlab.viz import TreeExplorer
from kdlab.viz.round_drawing import arrange
from tests.viz.node import run_module
from tests.viz.samples import TOKENIZER, Words, branched_record, make_record, make_run

SOURCES = sorted(Path(viz.__file__).parent.rglob("*.js"))
ROOT = Path(__file__).resolve().parents[2]
MODULE = Path(viz.__file__).parent / "widgets" / "tree_explorer.js"


def random_record(num_nodes, seed=0):
    rng = np.random.default_rng(seed)
    parents = [-1] + [int(rng.integers(max(0, row - 40), row)) for row in range(1, num_nodes + 1)]
    path = [0]
    while children := [row for row, parent in enumerate(parents) if parent == path[-1]]:
        path.append(children[-1])
    tokens = [row % 128 for row in range(num_nodes + 1)]
    logp = [-0.01 * row for row in range(num_nodes + 1)]
    return make_record(tokens, parents, tuple(path), 127, logp=logp)


def view_of(record, tokenizer=TOKENIZER):
    tokens = [int(record.tree.token[0, 0]), *record.accepted_tokens, record.bonus]
    return TreeExplorer(make_run([[record]], [tokens]), tokenizer).view


@pytest.mark.parametrize("record", [branched_record(), random_record(40), make_record("a", [-1], (0,), "b")])
def test_every_budget_marks_what_the_static_twin_marks(record):
    view = view_of(record)
    budgets = range(len(view["nodes"]) - 1)
    script = """data.budgets.map((b) => [m.keptPath(data.view, b), m.wantedRow(data.view, b),
        data.view.nodes.map((_, row) => m.isDropped(data.view, b, row))])"""
    found = run_module(MODULE, script, {"view": view, "budgets": list(budgets)})
    for budget, (path, wanted, dropped) in zip(budgets, found, strict=True):
        drawing = arrange(record, TOKENIZER, budget)
        assert (tuple(path), wanted) == (drawing.path, drawing.wanted)
        assert dropped == [drawing.is_dropped(row) for row in range(drawing.bonus + 1)]


@pytest.mark.parametrize("num_nodes", [1, 12, 255, 512])
def test_boxes_do_not_overlap_and_large_trees_stay_short(num_nodes):
    words = Words(["implementation"[: 1 + token % 14] for token in range(128)])
    place = run_module(MODULE, "m.layout(data)", view_of(random_record(num_nodes), words))
    spots = sorted((spot["line"], spot["x"], spot["width"]) for spot in place["spots"])
    assert len(spots) == num_nodes + 2
    for (line, x, width), (next_line, next_x, _) in pairwise(spots):
        assert line != next_line or x + width < next_x
    assert max(x + width for _, x, width in spots) < place["width"]
    lines = {line for line, _, _ in spots}
    assert lines == set(range(len(lines)))


def test_childless_siblings_of_a_wide_tree_share_lines_but_the_path_does_not():
    wide = make_record(list(range(101)), [-1] + [0] * 100, (0, 50), 127, logp=[0.0] + [-1.0] * 100)
    spots = run_module(MODULE, "m.layout(data)", view_of(wide))["spots"]
    assert max(spot["line"] for spot in spots) < 20
    assert [spot["line"] for spot in spots].count(spots[50]["line"]) == 2  # itself and the bonus behind it
    few = run_module(MODULE, "m.layout(data)", view_of(branched_record()))["spots"]
    assert all(spot["joined"] for spot in few[1:])


def test_the_numbers_follow_the_budget():
    view = view_of(branched_record())
    script = "[4, 3, 0].map((b) => Object.fromEntries(m.roundNumbers(data, b)))"
    whole, cut, none = run_module(MODULE, script, view)
    assert whole["accepted"] == "2 of 4"
    assert whole["tokens of the round"] == "3, the bonus counted"
    assert whole["ranks on the path"] == "0, 1"
    assert whole["budget that held it all"] == "4"
    assert cut["accepted"] == "1 of 3 (2 of 4 verified)"
    assert cut["left the tree at"] == "depth 1; the target wanted y"
    assert none["accepted"] == "0 of 0 (2 of 4 verified)"
    assert none["ranks on the path"] == "none"


def test_hovering_a_node_says_token_rank_and_probability():
    facts = run_module(MODULE, "[0, 4, 5].map((row) => m.nodeFacts(data, row))", view_of(branched_record()))
    root, node, bonus = map(dict, facts)
    assert (root["token"], bonus["token"], node["token"]) == ("a", "z", "y")
    assert node["depth, rank"].startswith("2, 1")
    assert node["probability"] == "45 % at its depth"
    assert node["in trees from"] == "budget 4"


STATE = {"prompt": 0, "round": 0, "budget": 5, "prompts": 2, "rounds": 3, "largest": 15}


@pytest.mark.parametrize(
    ("key", "shift", "moves"),
    [
        ("ArrowRight", False, {"round": 1}), ("ArrowLeft", False, {"round": 0}), ("ArrowUp", False, {"budget": 6}),
        ("ArrowDown", False, {"budget": 4}), ("ArrowUp", True, {"budget": 10}), ("ArrowDown", True, {"budget": 2}),
        ("PageDown", False, {"prompt": 1, "round": 0}), ("a", False, None), ("Tab", False, None),
    ],
)  # fmt: skip
def test_keys_move_rounds_budgets_and_prompts(key, shift, moves):
    assert run_module(MODULE, "m.keyMove(...data)", [key, shift, STATE]) == moves


def test_keys_stop_at_the_ends():
    ends = [["ArrowRight", {"round": 2}], ["ArrowUp", {"budget": 15}], ["PageDown", {"prompt": 1}]]
    ends = [[key, STATE | place] for key, place in ends]
    script = "data.map(([key, state]) => m.keyMove(key, false, state))"
    assert run_module(MODULE, script, ends) == [{"round": 2}, {"budget": 15}, {"prompt": 1, "round": 0}]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_scripts_write_text_only_and_load_nothing(path):
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    forbidden = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\("
    forbidden += r"|https?:|\bimport\b|fetch\(|url\("
    assert re.findall(forbidden, text) == []
    assert max(map(len, text.splitlines())) <= 120
    assert text.count("\n") <= 400


def test_scripts_and_styles_are_packed():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = data["kdlab.viz.widgets"]
    others = [path for path in MODULE.parent.iterdir() if path.is_file() and path.suffix != ".py"]
    assert {path.name for path in others} >= {"tree_explorer.js", "tree_explorer.css", "figure_image.js"}
    assert [path.name for path in others if not any(path.match(pattern) for pattern in patterns)] == []


def test_the_widget_brings_script_and_style():
    assert "function render" in str(TreeExplorer._esm)
    assert ".kdlab-tree" in str(TreeExplorer._css)
