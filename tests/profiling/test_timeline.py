"""Traces of torch.profiler read into launches: stages by the host's calls, graphs by their eager twins, the CPU."""

import pytest
import torch

from kdlab.kernels.stage import span, stage
from kdlab.profiling import profile_timeline
from kdlab.profiling import timeline as module
from kdlab.profiling.timeline import read_trace
from tests.profiling import trace_events
from tests.profiling.samples import PROVENANCE, Piece

EAGER = [
    event for repeat in range(3) for event in trace_events.eager_round(repeat, 1000.0 * repeat, 10 * repeat + 1)
]
GRAPH = [event for repeat in range(3) for event in trace_events.graph_round(repeat, 1000.0 * repeat, repeat + 1)]


def test_launches_have_the_stage_in_which_the_host_called_for_them():
    stray = [trace_events.call(99, 500.0), trace_events.kernel("outside", 99, 501.0, 1.0),
             trace_events.kernel("nobody called", 98, 502.0, 1.0)]  # fmt: skip
    found = read_trace([*EAGER, *stray])
    assert sorted(found) == [0, 1, 2]
    rows = [(row["kernel"], row["stage"], row.get("layer"), row["position"], row["start_us"]) for row in found[1]]
    fill = ("Memset (Device)", "", None, 2, 10.0)
    assert rows == [("attend", "attention", 1, 0, 0.0), ("merge", "", 1, 1, 6.0), fill]
    assert (found[1][0]["grid"], found[1][0]["registers"], found[1][2]["grid"]) == ("2, 1, 1", 40, None)


@pytest.fixture
def gpu_traces(monkeypatch):
    """Let a GPU be there, and give the traces in turns: first the eager one, then the graph's."""

    def install(graph):
        traces = iter([EAGER, graph])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(module, "gpu_state", lambda: {})
        monkeypatch.setattr(module, "_trace", lambda call, times, layers: next(traces))

    return install


def captured():
    return Piece("mini", lambda: None, capture=lambda: lambda: None)


def test_a_graph_takes_the_stages_of_the_eager_kernels_in_the_same_order(gpu_traces):
    gpu_traces(GRAPH)
    launches, messages = profile_timeline([captured()], PROVENANCE, repeats=2, layers=True)
    assert launches["mode"].tolist() == ["eager"] * 6 + ["graph"] * 6
    assert launches["repeat"].tolist() == [0, 0, 0, 1, 1, 1] * 2  # the first run is not kept
    graph = launches[launches["mode"] == "graph"]
    assert graph["stage"].tolist() == ["attention", "", ""] * 2
    assert graph["start_us"].tolist() == [0.0, 3.0, 6.0] * 2
    assert graph["layer"].fillna(-1).tolist() == [1, 1, -1] * 2
    assert [line.split(" us from")[0] for line in messages] == [
        "timeline: mini, eager: 11", "timeline: mini, graph: 7",
    ]  # fmt: skip


def test_branches_of_a_graph_take_their_stages_in_any_order(gpu_traces):
    attend, merge = "void attend<4>(float*)", "merge"
    swapped = {attend: merge, merge: attend}
    gpu_traces([{**event, "name": swapped.get(event["name"], event["name"])} for event in GRAPH])
    launches, messages = profile_timeline([captured()], PROVENANCE, repeats=2)
    graph = launches[launches["mode"] == "graph"]
    assert graph["kernel"].tolist()[:2] == ["merge", "attend"]
    assert graph["stage"].tolist() == ["", "attention", ""] * 2
    assert len(messages) == 2


def test_a_graph_of_other_kernels_has_no_stages_and_it_is_said(gpu_traces):
    other = [{**event, "name": "another"} if event["name"] == "merge" else event for event in GRAPH]
    gpu_traces(other)
    launches, messages = profile_timeline([captured()], PROVENANCE, repeats=2)
    assert set(launches[launches["mode"] == "graph"]["stage"]) == {""}
    assert messages[-1] == (
        "timeline: mini: 3 launches in the graph, 3 eager ones, not the same kernels: no stages"
    )


def test_a_trace_without_kernels_is_said(gpu_traces):
    gpu_traces([])
    launches, messages = profile_timeline([captured()], PROVENANCE, repeats=2)
    assert messages[-1] == "timeline: mini, graph: torch.profiler saw no kernel"
    assert set(launches["mode"]) == {"eager"}


def test_on_the_cpu_torchs_outermost_operations_stand_for_kernels():
    x = torch.ones(8, 8)

    def run():
        with span("round"), span("layer", 4), stage("attention"):
            torch.nn.functional.linear(x, x)
        torch.relu(x)

    launches, messages = profile_timeline([Piece("a", run), Piece("b", run)], PROVENANCE, repeats=2, layers=True)
    one = launches[(launches["case"] == "b") & (launches["repeat"] == 1)]
    assert one["kernel"].tolist() == ["aten::linear", "aten::relu"]
    assert one["stage"].tolist() == ["attention", ""]
    assert one["layer"].fillna(-1).tolist() == [4, -1]
    assert (one["duration_us"] > 0).all()
    assert messages[0].startswith("timeline: no GPU here; these are the CPU's times")
    launches, messages = profile_timeline([Piece("a", run)], PROVENANCE, repeats=1, seconds=-1.0)
    assert launches.empty
    assert messages[-1] == "timeline: out of time, left out from a"
