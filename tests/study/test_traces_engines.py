"""Responses of SGLang and vLLM: their counters become rounds, and counters that contradict each other do not."""

import json

import pytest

from kdlab import study
from kdlab.cli import main
from kdlab.errors import ArgumentError, SchemaError
from tests.study.test_traces import EXAMPLES, PROVENANCE

# Field for field what the engines' own pages show: SGLang of one chat completion, vLLM of one response.
SGLANG = {
    "spec_accept_rate": 63 / 215, "spec_accept_length": 106 / 43, "spec_num_correct_drafts": 63,
    "spec_num_proposed_drafts": 215, "spec_verify_ct": 43, "spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3],
}  # fmt: skip
OLDER = {
    "completion_tokens": 107, "spec_accept_token_num": 63, "spec_draft_token_num": 215, "spec_verify_ct": 43,
    "spec_accept_histogram": [11, 14, 11, 4, 0, 3],
}  # fmt: skip
VLLM = {
    "mean_acceptance_length": 53 / 43, "draft_acceptance_rate": 10 / 129, "acceptance_histogram": [39, 1, 0, 3],
    "acceptance_histogram_by_draft_length": {"3": [39, 1, 0, 3]}, "num_spec_steps": 43, "num_accepted_draft_tokens": 10,
    "num_draft_tokens": 129, "num_spec_tokens": 3,
}  # fmt: skip
STEPS = VLLM | {
    "num_spec_steps": 3, "num_accepted_draft_tokens": 3, "num_draft_tokens": 6, "per_step_accepted": [2, 0, 1],
    "per_step_drafted": [3, 2, 1],
}  # fmt: skip


def of_vllm(details):
    return {"id": "cmpl-1", "choices": [{"text": "a"}], "metrics": {"speculative_decoding": details}}


@pytest.mark.parametrize(
    "response",
    [
        {"text": "a", "meta_info": SGLANG},
        {"text": "a", "meta_info": OLDER},
        {"choices": [{"index": 0, "meta_info": SGLANG}]},
        {"choices": [{"index": 0}], "sglext": {"spec_tokens_details": SGLANG}},
    ],
    ids=["generate", "older", "choice", "sglext"],
)
def test_sglang_histograms_become_rounds(response):
    trace = study.import_responses("sglang", [response], PROVENANCE)
    row = study.traces_table(trace).iloc[0]
    assert (row["prompt_id"], row["num_rounds"], row["rows_per_round"]) == ("request-1", 43, 6.0)
    assert row["tokens_per_round"] == pytest.approx(1 + 63 / 43)
    assert sorted(row["round_lengths"]) == [1] * 11 + [2] * 14 + [3] * 11 + [4] * 4 + [6] * 3
    assert trace.provenance["round_order"] == "unknown"
    assert any("order" in line for line in study.trace_limits(trace))


def test_vllm_summaries_become_rounds():
    details = {name: value for name, value in VLLM.items() if name != "acceptance_histogram_by_draft_length"}
    for one in (VLLM, details):
        row = study.traces_table(study.import_responses("vllm", [of_vllm(one)], PROVENANCE)).iloc[0]
        assert (row["num_rounds"], row["rows_per_round"]) == (43, 4.0)
        assert row["tokens_per_round"] == pytest.approx(VLLM["mean_acceptance_length"])


def test_vllm_steps_keep_their_order_and_their_drafted_lengths():
    trace = study.import_responses("vllm", [of_vllm(STEPS)], PROVENANCE)
    assert (trace.prompts[0].accepted, trace.prompts[0].drafted) == ((2, 0, 1), (3, 2, 1))
    assert trace.provenance["round_order"] == "measured"
    by_length = STEPS | {"acceptance_histogram_by_draft_length": {"3": [0, 0, 1, 0], "2": [1, 0, 0], "1": [0, 1]}}
    by_length = {name: value for name, value in by_length.items() if not name.startswith("per_step")}
    spread = study.import_responses("vllm", [of_vllm(by_length)], PROVENANCE).prompts[0]
    assert sorted(zip(spread.accepted, spread.drafted, strict=True)) == [(0, 2), (1, 1), (2, 3)]


def test_names_come_from_the_wrapper_and_requests_without_a_round_are_counted():
    silent = VLLM | {"acceptance_histogram": [0, 0, 0, 0], "acceptance_histogram_by_draft_length": {}}
    silent |= {"num_spec_steps": 0, "num_accepted_draft_tokens": 0, "num_draft_tokens": 0}
    responses = [{"prompt_id": "q", "kind": "code", "response": of_vllm(VLLM)}, of_vllm(silent), of_vllm(STEPS)]
    trace = study.import_responses("vllm", responses, PROVENANCE, kind="prose")
    assert [(prompt.prompt_id, prompt.kind) for prompt in trace.prompts] == [("q", "code"), ("request-3", "prose")]
    assert trace.provenance["requests_without_rounds"] == 1
    assert trace.provenance["round_order"] == "unknown"


def test_a_request_that_sglang_answered_without_a_round_is_counted():
    responses = [{"meta_info": {"completion_tokens": 1}}, {"meta_info": SGLANG}]
    trace = study.import_responses("sglang", responses, PROVENANCE)
    assert (len(trace.prompts), trace.provenance["requests_without_rounds"]) == (1, 1)


@pytest.mark.parametrize(
    ("engine", "response", "said"),
    [
        ("sglang", {"meta_info": {"completion_tokens": 9}}, "expected meta_info or sglext.spec_tokens_details"),
        ("sglang", {"meta_info": {"spec_verify_ct": 43, "spec_accept_length": 2.5}}, "got only their totals"),
        ("sglang", {"meta_info": SGLANG | {"spec_verify_ct": 44}}, "spec_verify_ct, spec_num_correct_drafts: expected"),
        ("sglang", {"meta_info": SGLANG | {"spec_num_correct_drafts": 62}}, r"expected \(43, 63\) as in the histogram"),
        ("sglang", {"meta_info": SGLANG | {"spec_num_proposed_drafts": 216}}, "expected a multiple of 43 rounds"),
        ("sglang", {"meta_info": SGLANG | {"spec_correct_drafts_histogram": [1.5]}}, "expected a list of counts"),
        ("sglang", {"meta_info": SGLANG | {"spec_cap_lens_histogram": [0, 4, 39]}}, "expected one draft length"),
        ("sglang", {"meta_info": SGLANG | {"spec_cap_lens_histogram": 3}}, "expected one draft length"),
        ("vllm", of_vllm(VLLM | {"acceptance_histogram_by_draft_length": {"3": [2**31 - 1]}}), "at most 1,000,000"),
        ("sglang", {"choices": [{}, {}]}, "choices: expected one, got 2"),
        ("vllm", {"metrics": None}, "expected metrics.speculative_decoding"),
        ("vllm", of_vllm(None), "per-request-spec-decode-metrics"),
        ("vllm", of_vllm(VLLM | {"num_spec_steps": 42}), r"expected \(43, 10, 129\), the sums over its steps"),
        ("vllm", of_vllm(STEPS | {"per_step_drafted": [3, 3]}), "per_step_drafted: expected counts, as many of each"),
        ("vllm", of_vllm(STEPS | {"per_step_accepted": [1, 1, 0]}), "the sums over its steps"),
        ("vllm", of_vllm(VLLM | {"acceptance_histogram_by_draft_length": {"x": [1]}}), "expected counts by a length"),
        ("vllm", of_vllm(VLLM | {"acceptance_histogram_by_draft_length": None, "num_draft_tokens": 128}),
         "43 steps of 3 each without acceptance_histogram_by_draft_length"),
        ("vllm", "text", "expected an object"),
        ("vllm", {"response": [], "prompt_id": "a"}, "with an object as response"),
    ],
)  # fmt: skip
def test_responses_that_hold_no_rounds_are_refused_by_number(engine, response, said):
    good = {"meta_info": SGLANG} if engine == "sglang" else of_vllm(VLLM)
    with pytest.raises(SchemaError, match=f"^response 2: .*{said}"):
        study.import_responses(engine, [good, response], PROVENANCE)


def test_the_provenance_is_checked_with_the_rounds():
    with pytest.raises(SchemaError, match="drafted: expected at most the budget 2, got 3"):
        study.import_responses("vllm", [of_vllm(VLLM)], PROVENANCE | {"budget": 2})
    with pytest.raises(SchemaError, match=r"provenance\.thinking"):
        study.import_responses("vllm", [of_vllm(VLLM)], {k: v for k, v in PROVENANCE.items() if k != "thinking"})
    with pytest.raises(ArgumentError, match="engine"):
        study.import_responses("another", [], PROVENANCE)


@pytest.fixture
def kdlab(capsys):
    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_the_verbs_convert_and_check(tmp_path, kdlab):
    responses, provenance, out = (tmp_path / name for name in ("r.jsonl", "p.json", "out.parquet"))
    responses.write_text("".join(json.dumps({"meta_info": SGLANG}) + "\n" for _ in range(6)))
    provenance.write_text(json.dumps(PROVENANCE))
    status, text, _ = kdlab("traces", "convert", responses, out, "--engine", "sglang", "--provenance", provenance)
    assert (status, text) == (0, f"{out}: RoundTrace(method='chain', budget=7, num_prompts=6, rounds=258)\n")
    assert kdlab("traces", "convert", out, tmp_path / "out.jsonl")[0] == 0
    status, text, _ = kdlab("traces", "check", tmp_path / "out.jsonl")
    assert status == 0
    assert "These rounds speak for chain of budget 7 alone" in text
    found = json.loads(kdlab("traces", "check", out, "--json")[1])
    assert found["rows"][0]["tokens_per_round"] == pytest.approx(1 + 63 / 43)


def test_the_verbs_say_each_fault_with_its_line_and_status_2(tmp_path, kdlab):
    path = tmp_path / "t.jsonl"
    path.write_text(EXAMPLES["rounds.jsonl"].replace('"accepted": 6', '"accepted": 8'))
    status, text, _ = kdlab("traces", "check", path)
    assert (status, text) == (2, f"{path}:4: accepted: expected at most the 7 drafted, got 8\n1 fault\n")
    assert json.loads(kdlab("traces", "check", path, "--json")[1])["faults"][0].startswith(f"{path}:4: ")
    status, _, error = kdlab("traces", "convert", path, tmp_path / "t.parquet")
    assert (status, error) == (2, f"kdlab: {path}:4: accepted: expected at most the 7 drafted, got 8\n")
    for words in (["--provenance", path], ["--engine", "vllm"], ["--engine", "vllm", "--provenance", path]):
        status, _, error = kdlab("traces", "convert", path, tmp_path / "t.parquet", *words)
        assert status == 2
        assert error.count("\n") == 1
    assert kdlab("traces", "check", tmp_path / "none.jsonl")[0] == 2
