"""The recorded launches that ship: of one H200, captured rounds whole and with stages, counters within bounds."""

from kdlab.profiling import load_nsight, round_times, stage_shares


def test_recorded_rounds_are_whole_and_their_graphs_have_stages():
    launches = load_nsight()
    assert "H200" in launches["gpu"].iloc[0]
    times = round_times(launches)
    graph = times[times["mode"] == "graph"]
    assert {"k2.6", "mini"} <= {case.split()[0].rstrip(",") for case in graph["case"]}
    assert (graph["busy_us"] / graph["span_us"] > 0.9).all()
    for case in graph["case"].unique():
        one = launches[(launches["case"] == case) & (launches["mode"] == "graph")]
        assert {"draft", "build", "verify", "accept", "commit"} <= set(one["phase"])
        assert (one["stage"] != "").mean() > 0.8
    shares = stage_shares(launches).groupby(["case", "mode"])["share"].sum()
    assert (shares.sub(1.0).abs() < 1e-9).all()


def test_recorded_counters_are_within_what_the_card_has():
    counted = load_nsight()[lambda rows: rows["source"] == "ncu"]
    assert {"round", "kernels"} <= set(counted["subject"])
    for name in ("tensor_pct", "sm_pct", "dram_pct"):
        assert counted[name].between(0.0, 100.5).all(), name
    moved = (counted["dram_read"] + counted["dram_write"]) / (1e-6 * counted["duration_us"])
    assert (moved < 4.9e12).all()  # bytes a second that the memory has on paper, and what a counter rounds
