"""The real tools on a GPU: a captured round's timeline with its stages, and counters of a kernel under `ncu`."""

import shutil

import pytest

from kdlab.bench.profiled import profiled_round
from kdlab.cli import main
from kdlab.profiling import load_nsight, profile_timeline, round_times

pytestmark = pytest.mark.gpu


def test_a_captured_round_has_the_stages_of_the_eager_one():
    subject = profiled_round("bundled", rows=8)
    launches, messages = profile_timeline(subject.works, subject.provenance, repeats=2, layers=True)
    graph = launches[launches["mode"] == "graph"]
    assert {"draft", "build", "verify", "accept", "commit"} <= set(graph["phase"])
    assert set(graph["layer"].dropna()) == set(range(6))
    assert (graph["stage"] != "").mean() > 0.8
    assert set(launches[launches["phase"] == "prefill"]["mode"]) == {"eager"}
    times = round_times(graph)
    assert (times["busy_us"] > 0.5 * times["span_us"]).all()
    assert not [line for line in messages if "no stages" in line]


@pytest.mark.skipif(shutil.which("ncu") is None, reason="Nsight Compute is not here")
def test_counters_of_an_op_are_of_its_size(tmp_path):
    path = tmp_path / "nsight.parquet"
    words = ["profile", "kernels", "--ops", "draft_topk", "--only", "counters", "--seconds", "40", "--out", str(path)]
    assert main(words) == 0
    found = load_nsight(path)
    assert set(found["stage"]) == {"draft_topk"}
    one = found[found["case"] == found["case"].iloc[0]]
    least = 163_840 * 2 * 15  # the logits of a block, bfloat16
    assert one["dram_read"].sum() > 0.9 * least
    assert one[["duration_us", "sm_pct", "dram_pct", "tensor_pct", "registers"]].notna().all(axis=None)
