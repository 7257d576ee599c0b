"""Errors, goals and floors of the kernel benchmark, and its rows as one table: everything that needs no timing."""

import json

import pandas as pd
import pytest
import torch

from kdlab.bench import read_rows, write_rows
from kdlab.bench.kernels import (
    case_text,
    compare_runs,
    kernel_table,
    representative_cases,
    verdict_lines,
    with_other_modes,
)
from kdlab.bench.kernels.case import relative_error, wrong_share
from kdlab.bench.kernels.goals import goal_us, mma_goal_us
from kdlab.cli import main
from kdlab.errors import ArgumentError
from kdlab.kernels.cost import Cost
from tests.bench.samples import kernel_rows


@pytest.mark.parametrize(
    ("out", "exact", "error"),
    [
        ([[3.0, 4.0]], [[3.0, 4.0]], 0.0),
        ([[3.0, 4.5]], [[3.0, 4.0]], 0.1),
        ([[3.0, 4.0], [0.0, 1.0]], [[3.0, 4.0], [0.0, 2.0]], 0.5),
        ([[0.0, 0.0]], [[0.0, 0.0]], 0.0),
        ([[0.0, 1e-9]], [[0.0, 0.0]], float("inf")),
        ([[float("nan"), 0.0]], [[1.0, 0.0]], float("inf")),
    ],
)
def test_the_error_is_that_of_the_worst_row(out, exact, error):
    assert relative_error(torch.tensor(out), torch.tensor(exact).double()) == pytest.approx(error)


def test_integers_are_counted_and_shapes_compared():
    assert wrong_share(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert wrong_share(torch.tensor([1]), torch.tensor([1, 1])) == 1.0
    with pytest.raises(ValueError, match="shape"):
        relative_error(torch.ones(1, 2), torch.ones(2, 2).double())


def no_times(op, sizes, impl):
    return None


@pytest.mark.parametrize(
    ("op", "sizes", "floor", "goal"),
    [
        ("draft_topk", {"streams": 1, "k": 64}, 1.2, 8.0),
        ("draft_topk", {"streams": 8, "k": 64}, 9.6, 19.2),
        ("draft_topk", {"streams": 1, "k": 8}, 1.2, None),
        ("tree_build", {"streams": 1, "budget": 256}, 0.1, 15.0),
        ("tree_build", {"streams": 1, "budget": 512}, 0.1, None),
        ("tree_build", {"streams": 8, "budget": 256}, 0.1, None),
        ("verify_attention", {}, 20.0, None),
        ("target_sample", {}, 3.0, 6.0),
        ("target_sample", {}, 0.1, 2.12),
        ("tree_accept", {"streams": 8, "rows": 64}, 0.1, 2.5),
        ("tree_accept", {"streams": 1, "rows": 64}, 0.1, None),
        ("kv_commit", {"streams": 1, "moved": 8, "tap_width": 0}, 0.3, 5.0),
        ("kv_commit", {"streams": 8, "moved": 8, "tap_width": 0}, 0.3, None),
        ("moe_int4", {}, 75.0, 100.0),
        ("norm_rope", {}, 1.0, None),
    ],
)
def test_goals_are_those_of_the_design(op, sizes, floor, goal):
    cost = Cost(round(4_140_000 * floor))
    assert goal_us(op, sizes, cost, no_times) == (goal if goal is None else pytest.approx(goal))


def test_goals_that_stand_on_other_times():
    times = {("verify_attention", "flashmla prefix"): 100.0, ("tree_build", "cuda"): 10.0}

    def medians(op, sizes, impl):
        assert sizes.get("streams", 1) == 1
        return times[op, impl]

    short, long = Cost(0, 40 * 785_000_000), Cost(0, 80 * 785_000_000)
    assert goal_us("verify_attention", {"streams": 1}, short, medians) == pytest.approx(75.0)
    assert goal_us("verify_attention", {"streams": 1}, long, medians) == pytest.approx(80.0 / 0.83 + 4.0)
    assert goal_us("tree_build", {"streams": 8, "budget": 512}, Cost(1), medians) == pytest.approx(11.0)


def test_the_portable_kernel_is_held_against_mma_sync_alone():
    sizes = {"streams": 8, "rows": 33, "prefix": 4096, "heads": 64}
    assert mma_goal_us("verify_attention", sizes, 600_000_000, 1e12) == pytest.approx(1000.0)
    assert mma_goal_us("verify_attention", sizes | {"rows": 9}, 600_000_000, 1e12) is None
    assert mma_goal_us("moe_int4", sizes, 600_000_000, 1e12) is None


def test_rows_become_one_table_and_go_through_a_file(tmp_path):
    write_rows(kernel_rows(), tmp_path / "rows.parquet")
    table = kernel_table(read_rows(tmp_path / "rows.parquet"))
    line = table[(table["op"] == "verify_attention") & (table["impl"] == "wgmma") & (table["prefix"] == 4096)].iloc[0]
    assert line["case"] == "S=1 N=33 prefix=4096 H=64"
    assert (line["us"], line["floor_us"], line["own"], line["mode"]) == (40.0, 24.0, True, "graph")
    assert line["roofline"] == pytest.approx(0.6)
    assert line["goal_us"] == pytest.approx(max(0.75 * 50.0, 24.0 * 4.0 / 4.14 / 0.83 + 4.0))
    assert line["verdict"] == "missed"
    peers = table[table["impl"] == "flashmla prefix"]
    assert not peers["own"].any()
    assert peers["verdict"].isna().all()
    assert table.loc[table["mode"] != "graph", "verdict"].isna().all()


def test_the_printed_table_has_one_line_an_arm():
    wide = with_other_modes(kernel_table(kernel_rows())).set_index(["op", "case", "impl"])
    assert not wide.index.duplicated().any()
    arm = wide.loc["verify_attention", "S=1 N=33 prefix=4096 H=64", "wgmma"]
    assert (arm["mode"], arm["us"], arm["eager_us"], arm["warm_us"]) == ("graph", 40.0, 70.0, 38.0)
    host = wide.loc["tree_build", "S=1 B=64 L=15 K=64 peaked", "host heap"]
    assert (host["mode"], host["us"], host["eager_us"]) == ("eager", 730.0, 730.0)
    assert pd.isna(host["warm_us"])


def test_verdicts_count_what_is_met_and_name_what_is_missed():
    lines = verdict_lines(kernel_table(kernel_rows()))
    assert lines[0] == "7 of 8 goals met"
    assert lines[1:] == [
        "missed by 7%: verify_attention S=1 N=33 prefix=4096 H=64, wgmma: 40.0 us, goal 37.5, floor 24.0"
    ]


def test_a_table_is_of_one_run():
    rows = kernel_rows()
    with pytest.raises(ArgumentError, match="no kernel times"):
        kernel_table(rows[rows["op"] == "ceiling"])
    both = pd.concat([rows, rows.assign(run_id="another")])
    with pytest.raises(ArgumentError, match="2 runs"):
        kernel_table(both)


def test_the_overview_has_one_case_an_op():
    table = kernel_table(kernel_rows())
    chosen = representative_cases(table).drop_duplicates(["op", "case"]).set_index("op")["case"].to_dict()
    assert chosen["verify_attention"] == "S=1 N=33 prefix=4096 H=64"
    assert chosen["tree_build"] == "S=1 B=64 L=15 K=64 peaked"
    assert list(chosen) == list(dict.fromkeys(table["op"]))


def test_two_runs_are_compared_time_by_time(tmp_path, capsys):
    first, second = kernel_rows(), kernel_rows()
    moved = (second["impl"] == "mma") & (second["context"] == 4096) & (second["graph"] == "graph")
    second.loc[moved, ["value", "median"]] *= 1.2
    apart = compare_runs(first, second)
    assert len(apart) == len(kernel_table(first).query("mode == 'graph'"))
    assert apart["difference"].iloc[0] == pytest.approx(0.2)
    assert (apart["difference"].iloc[1:] == 0.0).all()
    with pytest.raises(ArgumentError, match="same GPU"):
        compare_runs(first, second.assign(gpu="another"))
    write_rows(first, tmp_path / "a")
    write_rows(second, tmp_path / "b")
    assert main(["bench", "compare", f"{tmp_path}/a", f"{tmp_path}/a"]) == 0
    assert "20 of 20 graph times agree within 5%" in capsys.readouterr().out
    assert main(["bench", "compare", f"{tmp_path}/a", f"{tmp_path}/b"]) == 1
    assert "mma" in capsys.readouterr().out
    assert main(["bench", "compare", f"{tmp_path}/a", f"{tmp_path}/b", "--tolerance", "0.3"]) == 0
    assert main(["bench", "compare", f"{tmp_path}/a", f"{tmp_path}/b", "--tolerance", "-1"]) == 2
    write_rows(first[first["op"] != "draft_topk"].reset_index(drop=True), tmp_path / "c")
    capsys.readouterr()
    assert main(["bench", "compare", f"{tmp_path}/a", f"{tmp_path}/c"]) == 0
    assert "arms were timed in one run only" in capsys.readouterr().out


def test_sizes_in_words():
    sizes = {"heads": 64, "prefix": 4096, "rows": 33, "streams": 8}
    assert case_text({"streams": 1, "budget": 64, "draft": "peaked"}) == "S=1 B=64 peaked"
    assert case_text({"rows": 1, "temperature": 1.0, "top_p": 1.0}) == "N=1 T=1"
    assert case_text({"rows": 33, "shared": True, "tap_width": 0, "temperature": 0.5}) == "N=33 shared T=0.5"
    assert json.loads(kernel_rows()["case"].iloc[0]).keys() <= sizes.keys() | {"of", "what"}
