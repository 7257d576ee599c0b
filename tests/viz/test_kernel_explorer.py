"""The kernel explorer without a browser: what it draws over, how its traits move together, its static twin."""

import json
import re
import threading
from pathlib import Path

import pandas as pd
import pytest
from traitlets import TraitError

import kdlab.viz
from kdlab.bench import read_rows
from kdlab.bench.kernels import kernel_table
from kdlab.errors import ArgumentError
from kdlab.paths import DATA
from kdlab.profiling import launches_frame
from kdlab.viz import KernelExplorer, png_bytes
from kdlab.viz.kernels import arm_style
from kdlab.viz.widgets.kernel_explorer_lines import KernelLines
from tests.bench.samples import kernel_rows
from tests.profiling.samples import PROVENANCE, launch

FACTS = {"gpu": "GPU X", "git_commit": "0123456789"}
RECORDED = DATA / "recorded" / "kernels-h200.parquet"
CASE = "S=1 N=33 prefix=1024 H=64"


@pytest.fixture(scope="module")
def table():
    return kernel_table(kernel_rows())


def counted(**columns):
    """Two launches of a call of wgmma, the second three times as long as the first."""
    own = {"subject": "kernels", "case": f"verify_attention {CASE} (wgmma)"}
    own |= {"dram_read": 3e6, "dram_write": 1e6, "l2_read": 5e7}
    rows = [
        launch(0, "verify_attention", **own, kernel="attend", duration_us=10.0, tensor_pct=80.0),
        launch(1, "verify_attention", **own, kernel="merge", duration_us=30.0, tensor_pct=0.0),
    ]  # fmt: skip
    return launches_frame([row | columns for row in rows], PROVENANCE)


def test_lines_run_over_sizes_that_differ_and_cases_are_the_rest(table):
    lines = KernelLines(table)
    assert lines.ops == ["verify_attention", "draft_topk", "tree_build", "tree_accept", "moe_int4"]
    assert lines.sizes("verify_attention") == ["prefix", "heads", "streams"]
    assert lines.cases("verify_attention", "prefix") == ["S=1 N=33 H=64", "S=1 N=33 H=8", "S=8 N=33 H=8"]
    points = lines.points("verify_attention", "prefix", "S=1 N=33 H=64")
    assert points == {float(prefix): f"S=1 N=33 prefix={prefix} H=64" for prefix in (256, 1024, 4096)}
    assert lines.place("verify_attention", "heads", "S=1 N=33 prefix=4096 H=64") == ("S=1 N=33 prefix=4096", 1)
    with pytest.raises(ArgumentError, match="whole_case"):
        lines.place("verify_attention", "heads", "S=1")


def test_every_case_of_every_op_is_reached_over_every_size(table):
    lines = KernelLines(table)
    for op, rows in table.groupby("op"):
        for x in lines.sizes(op):
            found = [whole for case in lines.cases(op, x) for whole in lines.points(op, x, case).values()]
            assert sorted(found) == sorted(rows["case"].unique())


def test_an_op_of_one_case_still_has_a_size_and_one_without_sizes_is_refused(table):
    lines = KernelLines(table)
    (x,) = lines.sizes("moe_int4")
    (case,) = lines.cases("moe_int4", x)
    assert list(lines.points("moe_int4", x, case).values()) == ["S=1 N=33 I=2048 uniform"]
    with pytest.raises(ArgumentError, match="with a size above 0"):
        KernelLines(table[table["op"] == "moe_int4"].assign(streams=0, rows=0, width=0))
    with pytest.raises(ArgumentError, match="table"):
        KernelLines(table.iloc[:0])


def test_a_case_that_was_timed_twice_is_one_point_with_its_first_times(table):
    twice = pd.concat([table, table.assign(us=2.0 * table["us"])], ignore_index=True)
    assert KernelExplorer(twice).view == KernelExplorer(table).view


def test_every_view_of_the_recorded_benchmark_goes_through_json():
    shown = KernelExplorer(kernel_table(read_rows(RECORDED)))
    for op in shown.lines.ops:
        shown.op = op
        for x in shown.lines.sizes(op):
            shown.set_state({"x": x})
            for case in shown.lines.cases(op, x):
                shown.set_state({"case": case})
                assert (shown.view["op"], shown.view["x"], shown.view["case"]) == (op, x, case)
                json.dumps(shown.view, allow_nan=False)


def test_arms_of_an_op_are_told_apart_by_hue_or_mark(table):
    more = table[table["impl"] == "torch"]
    several = pd.concat([table, *[more.assign(impl=f"torch {name}") for name in ("a", "d", "g")]])
    looks = [(arm["hue"], arm["marker"]) for arm in KernelLines(several).arms("draft_topk")]
    assert len(set(looks)) == len(looks) == 5
    eager = {arm["name"]: arm["eager"] for arm in KernelLines(table).arms("tree_build")}
    assert eager == {"cuda": False, "host heap": True}


def test_the_page_knows_how_to_draw_every_mark():
    page = (Path(kdlab.viz.__file__).parent / "widgets" / "kernel_explorer.js").read_text()
    marks = page.split("const MARKS = {")[1].split("};")[0]
    drawn = set(re.findall(r"""(?:^|[ ,])"?([^\s",:]+)"?: "M""", marks, flags=re.MULTILINE))
    rows = read_rows(DATA / "recorded" / "kernels-h200.parquet").to_dict("records")
    recorded = {(str(row["impl"]), row["method"] == "own") for row in rows}
    wanted = {arm_style({"impl": name, "own": own})["marker"] for name, own in recorded | {("a new peer", False)}}
    assert len(wanted) > 12
    assert wanted <= drawn


def test_the_view_holds_what_the_table_says_and_goes_through_json(table):
    shown = KernelExplorer(table, provenance=FACTS, notes=["recorded"])
    view = shown.view
    assert json.loads(json.dumps(view, allow_nan=False)) == view
    assert (view["op"], view["x"], view["case"]) == ("verify_attention", "prefix", "S=1 N=33 H=64")
    assert view["values"] == [256.0, 1024.0, 4096.0]
    assert shown.whole_case == "S=1 N=33 prefix=4096 H=64"
    arms = {arm["name"]: arm for arm in view["arms"]}
    own = table[(table["op"] == "verify_attention") & (table["case"] == shown.whole_case)].set_index(["impl", "mode"])
    point = arms["wgmma"]["points"][2]
    assert (point["us"], point["eager_us"]) == (own["us"]["wgmma", "graph"], own["us"]["wgmma", "eager"])
    assert (point["goal_us"], point["verdict"]) == (own["goal_us"]["wgmma", "graph"], own["verdict"]["wgmma", "graph"])
    assert arms["naive"]["points"][2]["goal_us"] is None
    assert view["floors"][2] == own["floor_us"].iloc[0]
    assert not arms["flashmla prefix"]["own"]
    assert view["caption"].startswith("recorded · GPU X")


def test_another_size_keeps_the_chosen_point_and_another_op_begins_at_its_own(table):
    shown = KernelExplorer(table)
    shown.x = "heads"
    assert (shown.case, shown.point) == ("S=1 N=33 prefix=4096", 1)
    shown.point = 0
    shown.x = "streams"
    assert (shown.case, shown.point) == ("N=33 prefix=4096 H=8", 0)
    shown.arms = ["wgmma"]
    shown.op = "draft_topk"
    assert (shown.view["op"], shown.arms) == ("draft_topk", ["cuda", "torch"])
    assert shown.whole_case == "S=1 N=15 V=163840 K=64"


def test_another_case_keeps_the_place_where_it_has_one(table):
    shown = KernelExplorer(table)
    assert shown.point == 2
    shown.case = "S=8 N=33 H=8"
    assert (shown.point, shown.whole_case) == (0, "S=8 N=33 prefix=4096 H=8")


def test_a_view_is_made_once_a_change_and_none_for_points_and_arms(table):
    shown, views = KernelExplorer(table), []
    shown.observe(lambda change: views.append(change["new"]), names="view")
    shown.set_state({"op": "tree_build"})
    assert len(views) == 1
    shown.point, shown.arms = 0, ["host heap", "cuda"]
    assert shown.arms == ["cuda", "host heap"]
    assert len(views) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("op", "none"), ("x", "rows"), ("case", "S=9"), ("point", 3), ("point", -1), ("arms", ["none"])]
)
def test_choices_that_do_not_exist_are_refused_and_leave_everything_as_it_was(table, name, value):
    shown = KernelExplorer(table)
    before = (shown.op, shown.x, shown.case, shown.point, shown.arms, shown.view)
    with pytest.raises(TraitError, match=name):
        setattr(shown, name, value)
    assert (shown.op, shown.x, shown.case, shown.point, shown.arms, shown.view) == before


def test_counted_launches_stand_at_their_arm_and_case_weighted_by_time(table):
    shown = KernelExplorer(table, counted())
    arms = {arm["name"]: arm["points"] for arm in shown.view["arms"]}
    assert arms["wgmma"][1]["counted"] == {
        "dram_bytes": 8e6, "l2_bytes": 1e8, "tensor_pct": 20.0, "kernels": ["attend", "merge"],
    }  # fmt: skip
    assert [arms["wgmma"][2]["counted"], arms["mma"][1]["counted"]] == [None, None]
    assert shown.view["counted"]
    assert shown.view["caption"] == "launches counted at commit abc"


def test_what_was_not_counted_is_empty_and_rounds_are_no_calls(table):
    shown = KernelExplorer(table, counted(dram_read=None, tensor_pct=None))
    point = next(arm for arm in shown.view["arms"] if arm["name"] == "wgmma")["points"][1]
    assert (point["counted"]["dram_bytes"], point["counted"]["tensor_pct"]) == (None, None)
    assert not KernelExplorer(table, counted(subject="round")).view["counted"]


def test_a_worker_thread_may_move_it(table):
    shown = KernelExplorer(table)
    worker = threading.Thread(target=shown.set_trait, args=("op", "moe_int4"))
    worker.start()
    worker.join()
    assert shown.view["op"] == "moe_int4"


def test_the_static_twin_has_the_arms_on_show(table):
    shown = KernelExplorer(table, provenance=FACTS)
    shown.arms = ["mma", "wgmma"]
    figure = shown.static()
    (ax,) = figure.axes
    lines = {tuple(line.get_ydata()) for line in ax.lines}
    assert lines >= {(12.0, 18.0, 40.0), (15.0, 24.0, 60.0)}
    assert (200.0, 900.0, 8600.0) not in lines
    assert ax.get_title(loc="left") == "S=1 N=33 H=64"
    assert "GPU X" in figure.get_supxlabel()
    png_bytes(figure, 60)
