"""The kernel explorer's JavaScript without a page: the table of a point, keys, and the logarithmic axes."""

from pathlib import Path

import pytest

from kdlab import viz
from kdlab.bench.kernels import kernel_table
from kdlab.viz import KernelExplorer
from tests.bench.samples import kernel_rows
from tests.viz.node import run_module
from tests.viz.test_kernel_explorer import counted

MODULE = Path(viz.__file__).parent / "widgets" / "kernel_explorer.js"


@pytest.fixture(scope="module")
def shown():
    return KernelExplorer(kernel_table(kernel_rows()), counted())


def table_of(shown, point, arms):
    data = {"view": shown.view, "point": point, "arms": arms}
    return run_module(MODULE, "m.pointTable(data.view, data.point, data.arms)", data)


def test_the_table_of_a_point_compares_with_bound_goal_and_best_peer(shown):
    rows = table_of(shown, 2, shown.arms)
    assert [row["name"] for row in rows] == ["wgmma", "flashmla prefix", "mma", "naive"]
    best = rows[0]
    assert (best["time"], best["floor"], best["peer"]) == ("40 µs", "1.67 ×", "0.800 ×")
    assert best["goal"].endswith((", met", ", missed"))
    assert (best["warm"], best["eager"]) == ("38 µs", "70 µs")
    assert rows[1]["peer"] == rows[1]["goal"] == ""
    assert rows[3]["time"] == "8,600 µs"


def test_an_arm_that_is_hidden_is_neither_in_the_table_nor_the_best_peer(shown):
    rows = table_of(shown, 2, ["mma", "wgmma"])
    assert [(row["name"], row["peer"]) for row in rows] == [("wgmma", ""), ("mma", "")]


def test_what_was_counted_stands_beside_the_time(shown):
    (row,) = table_of(shown, 1, ["wgmma"])
    assert (row["memory"], row["l2"], row["tensor"], row["kernels"]) == ("8 MB", "100 MB", "20 %", "attend, merge")
    (row,) = table_of(shown, 2, ["wgmma"])
    assert (row["memory"], row["tensor"], row["kernels"]) == ("", "", "")


def test_the_point_in_words(shown):
    script = "[m.pointWords(data, 2, ['mma', 'wgmma']), m.pointWords(data, 2, [])]"
    some, none = run_module(MODULE, script, shown.view)
    assert some == "verify_attention, S=1 N=33 H=64, prefix 4,096: wgmma is the quickest with 40 µs, bound 24 µs"
    assert none == "verify_attention, S=1 N=33 H=64, prefix 4,096: no arm on show was timed"


@pytest.mark.parametrize(
    ("key", "moves"),
    [
        ("ArrowLeft", {"point": 0}), ("ArrowRight", {"point": 2}), ("ArrowDown", {"case": "S=1 N=33 H=8"}),
        ("ArrowUp", {"case": "S=1 N=33 H=64"}), ("PageDown", {"op": "draft_topk"}),
        ("PageUp", {"op": "verify_attention"}), ("x", {"x": "heads"}), ("1", {"arms": ["mma"]}),
        ("2", {"arms": ["wgmma"]}), ("3", {"arms": ["wgmma", "mma", "naive"]}), ("9", None), ("0", None), ("a", None),
        ("Tab", None),
    ],
)  # fmt: skip
def test_keys_move_point_case_op_size_and_arms(shown, key, moves):
    state = {name: shown.view[name] for name in ("op", "x", "case")} | {"point": 1, "arms": ["wgmma", "mma"]}
    data = {"key": key, "view": shown.view, "state": state}
    assert run_module(MODULE, "m.keyMove(data.key, data.view, data.state)", data) == moves


def test_only_the_op_moves_before_the_view_of_the_last_key_is_there(shown):
    state = {"op": "draft_topk", "x": shown.view["x"], "case": shown.view["case"], "point": 1, "arms": []}
    script = "['PageDown', 'ArrowRight', 'ArrowDown', 'x', '1'].map((key) => m.keyMove(key, data.view, data.state))"
    found = run_module(MODULE, script, {"view": shown.view, "state": state})
    assert found == [{"op": "tree_build"}, None, None, None, None]


@pytest.mark.parametrize("values", [[1, 9, 17, 33, 65], [33], [0.5, 8600], [7.7475, 112.8]])
def test_axes_hold_their_values_in_order_with_ticks_between(values):
    script = """(() => { const s = m.logScale(data, 60, 700);
        return [data.map(s.place), s.ticks, s.ticks.map(s.place)]; })()"""
    places, ticks, at = run_module(MODULE, script, values)
    assert places == sorted(places)
    assert 60 < places[0] <= places[-1] < 700
    assert all(60 <= place <= 700 for place in at)
    assert len(ticks) <= 12
    assert len(ticks) >= 1 or values == [33]


def test_times_have_three_digits_and_no_exponent():
    words = run_module(MODULE, "data.map(m.time)", [0.5, 1.0712, 33.62, 46, 2847.2, 163840])
    assert words == ["0.5", "1.07", "33.6", "46", "2,847", "163,840"]
