"""A trace beside a recording: equal axes, its own point alone, and a word on whether the two may be compared."""

import pytest

from kdlab import study
from kdlab.errors import ArgumentError
from kdlab.viz import arm_label, plot_trace, png_bytes, trace_findings

PROVENANCE = {
    "engine": "some engine 1.0", "target": "t", "drafter": "d", "method": "tree", "budget": 15, "prompt_set_id": "p",
    "max_new_tokens": 64, "temperature": 0.0, "top_p": 1.0, "dtype": "bfloat16", "thinking": None, "streams": None,
    "graph": None, "gpu": None, "target_sha256": None, "drafter_sha256": None, "prompt_set_digest": None,
    "template_hash": None, "simulated": False,
}  # fmt: skip


@pytest.fixture
def trace():
    places = [(prompt, number) for prompt in range(6) for number in range(3)]
    rows = [
        {"prompt_id": f"p{prompt}", "kind": "code", "round": number, "accepted": (prompt + number) % 4, "drafted": 15}
        for prompt, number in places
    ]
    return study.round_trace(rows, PROVENANCE)


def test_both_panels_have_one_scale_and_the_trace_is_one_point(summary, trace):
    figure = plot_trace(summary, study.trace_summary(trace), engine="some $engine", provenance={"gpu": "GPU X"})
    first, second = figure.axes
    assert (first.get_xlim(), first.get_ylim()) == (second.get_xlim(), second.get_ylim())
    assert first.get_xticks().tolist() == second.get_xticks().tolist()
    (point,) = [line for line in second.lines if line.get_marker() == "P" and len(line.get_xdata())]
    lengths = [accepted + 1 for prompt in trace.prompts for accepted in prompt.accepted]
    assert point.get_xydata().tolist() == [[16.0, pytest.approx(sum(lengths) / len(lengths))]]
    assert "some" in second.get_title(loc="left")
    assert "GPU X" in figure.get_supxlabel()
    png_bytes(figure, 50)
    with pytest.raises(ArgumentError, match="axes: expected two"):
        plot_trace(summary, summary, [first])


def test_findings_say_what_was_measured_and_why_it_is_not_compared(trace):
    summary = study.trace_summary(trace)
    same = trace_findings(summary, trace.provenance, trace.provenance, study.trace_limits(trace))
    assert arm_label("tree", 15) == "another tree, budget 15"
    assert same.startswith("- The trace: another tree, budget 15, ")
    assert "interval" in same.splitlines()[0]
    assert "made from the same models" in same
    other = trace_findings(summary, trace.provenance, {**PROVENANCE, "temperature": 0.6})
    assert "**Not to be compared** with the recording: temperature: results with 0.6 and 0.0" in other
