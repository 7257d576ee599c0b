"""What goes wrong in a decode: rows that are not finite, arguments that make no sense, prompts that do not fit."""

import numpy as np
import pytest
import torch

import kdlab
from kdlab.errors import ArgumentError, KdlabError, UnsupportedDevice
from kdlab.paths import DATA
from tests.pairs import golden_prompts, tiny_pair

PROMPT = "the cat sees the "


@pytest.fixture
def broken_drafts(monkeypatch):
    """Let every draft hold NaN, +inf or nothing at all in some rows."""
    pair = tiny_pair()
    original, calls = type(pair).draft_logits, []

    def draft(self, *arguments):
        logits = original(self, *arguments).clone()
        kind = len(calls) % 5
        calls.append(kind)
        if kind == 0:
            logits[:, 3, 5] = torch.nan
        elif kind == 1:
            logits[:, 2] = torch.nan
        elif kind == 2:
            logits[:] = torch.nan
        elif kind == 3:
            logits[:, 0] = -torch.inf
        else:
            logits[:, 6, 9] = torch.inf
        return logits

    monkeypatch.setattr(type(pair), "draft_logits", draft)
    return pair


@pytest.mark.parametrize("options", [dict(method="chain"), dict(budget=16), dict(method="beam", width=3)], ids=str)
def test_drafts_that_are_not_finite_cost_depth_and_never_the_text(broken_drafts, options):
    plain = kdlab.generate(broken_drafts, PROMPT, method="ar", max_new_tokens=40)
    run = kdlab.generate(broken_drafts, PROMPT, max_new_tokens=40, **options)
    assert run.output_ids == plain.output_ids
    usable_depth = [3, 2, 0, 0, 6]
    for index, record in enumerate(run.rounds[0]):
        assert record.nonfinite_draft_rows >= 1
        assert int(record.tree.depth.max()) <= usable_depth[index % 5]


def test_target_logits_that_are_not_finite_end_the_decode_with_the_place(monkeypatch):
    pair = tiny_pair()
    original = type(pair.target).head
    monkeypatch.setattr(type(pair.target), "head", lambda self, hidden, *ops: original(self, hidden, *ops) * torch.nan)
    with pytest.raises(KdlabError, match=r"prompt 0.*not finite"):
        kdlab.generate(pair, PROMPT, method="ar")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (dict(method="tree"), "method"),
        (dict(budget=-1), "budget"),
        (dict(budget=2.5), "budget"),
        (dict(budget=True), "budget"),
        (dict(width=4), "width"),
        (dict(method="beam"), "width"),
        (dict(method="beam", width=0), "width"),
        (dict(top_k=0), "top_k"),
        (dict(top_k=129), "top_k"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(temperature=-0.1), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(temperature=float("inf")), "temperature"),
        (dict(temperature="hot"), "temperature"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.01), "top_p"),
        (dict(seed=-1), "seed"),
        (dict(seed=2**64), "seed"),
        (dict(stop_token_ids=[128]), "stop_token_ids"),
        (dict(stop_token_ids="x"), "stop_token_ids"),
        (dict(stop_token_ids=3), "stop_token_ids"),
        (dict(streams=0), "streams"),
        (dict(impl="fast"), "impl"),
        (dict(graph="yes"), "graph"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options, name):
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        kdlab.generate(tiny_pair(), PROMPT, **options)


def test_a_graph_is_refused_on_the_cpu():
    with pytest.raises(UnsupportedDevice, match="graph 'on' needs a CUDA GPU"):
        kdlab.generate(tiny_pair(), PROMPT, graph="on")


@pytest.mark.parametrize("impl", ["naive", "mma", "wgmma", "flashmla"])
def test_kernels_are_refused_on_the_cpu(impl):
    with pytest.raises(UnsupportedDevice, match=f"impl '{impl}' needs a CUDA GPU"):
        kdlab.generate(tiny_pair(), PROMPT, impl=impl)


@pytest.mark.parametrize("prompts", ["", [], [[]], ["the ", ""], [[128]], [[-1]], [["a"]], 3, None, ["é"]], ids=str)
def test_prompts_that_cannot_be_decoded_are_refused(prompts):
    with pytest.raises(ArgumentError, match="prompt"):
        kdlab.generate(tiny_pair(), prompts)


def test_token_id_0_is_a_token():
    run = kdlab.generate(tiny_pair(), [[0, 116, 104]], budget=8, max_new_tokens=8)
    assert run.prompt_ids == [[0, 116, 104]]
    assert run.output_ids == kdlab.generate(tiny_pair(), [[0, 116, 104]], method="ar", max_new_tokens=8).output_ids


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        (dict(target="no-such-pair"), ArgumentError, "target"),
        (dict(target=None), ArgumentError, "target"),
        (dict(drafter="no-such-directory"), ArgumentError, "drafter"),
        (dict(dtype="float8"), ArgumentError, "dtype"),
        (dict(device="tpu"), ArgumentError, "device"),
        (dict(device=3.5), ArgumentError, "device"),
        (dict(ranks=8), ArgumentError, "ranks"),
        (dict(ranks=0), ArgumentError, "ranks"),
        (dict(experts="pp"), ArgumentError, "experts"),
    ],
    ids=str,
)
def test_load_pair_names_what_is_wrong(options, error, name):
    with pytest.raises(error, match=name):
        kdlab.load_pair(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_said():
    with pytest.raises(UnsupportedDevice, match="sees no CUDA GPU"):
        kdlab.load_pair(device="cuda")


def test_a_pair_without_a_drafter_decodes_ar_alone():
    pair = kdlab.load_pair(DATA / "tiny-pair" / "target")
    assert kdlab.generate(pair, PROMPT, method="ar", max_new_tokens=4).provenance["drafter_sha256"] is None
    with pytest.raises(ArgumentError, match="no drafter"):
        kdlab.generate(pair, PROMPT)


def test_expert_ids_of_every_row_are_kept_when_asked_for():
    run = kdlab.generate(tiny_pair(), golden_prompts()[:2], budget=6, max_new_tokens=12, record_experts=True)
    for rounds in run.rounds:
        for record in rounds:
            assert record.expert_ids.shape == (3, record.tree.capacity, 2)
            assert ((record.expert_ids >= 0) & (record.expert_ids < 8)).all()
            assert (record.expert_ids[..., 0] != record.expert_ids[..., 1]).all()
    without = kdlab.generate(tiny_pair(), golden_prompts()[:2], budget=6, max_new_tokens=12)
    assert without.rounds[0][0].expert_ids is None


def test_the_run_row_tells_block_size_and_budget_apart():
    run = kdlab.generate(tiny_pair(), PROMPT, budget=64, max_new_tokens=4)
    row = run.provenance
    assert (row["block_size"], row["budget"], row["top_k"]) == (8, 64, 64)
    assert all(record.tree.depth_limit == 7 for record in run.rounds[0])
    assert row["graph"] == "eager"
    assert row["temperature"] == 0.0


def test_progress_counts_prompts():
    seen = []
    options = dict(max_new_tokens=12, streams=2, progress=lambda *done: seen.append(done))
    kdlab.generate(tiny_pair(), golden_prompts(), **options)
    assert seen[-1] == (4, 4)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("pair", [None, "bundled", 5])
@pytest.mark.parametrize("call", [kdlab.generate, kdlab.record])
def test_what_is_no_pair_is_refused(call, pair):
    with pytest.raises(ArgumentError, match="pair: expected a Pair"):
        call(pair, PROMPT)


@pytest.mark.parametrize("budget", [16_385, 10**9, 2**63])
def test_a_budget_that_no_memory_holds_is_refused(budget):
    for method in ("ddtree", "chain", "ar"):
        with pytest.raises(ArgumentError, match="budget: expected at most 16384"):
            kdlab.generate(tiny_pair(), PROMPT, method=method, budget=budget)


def test_a_beam_as_wide_as_anything_comes_back():
    run = kdlab.generate(tiny_pair(), PROMPT, method="beam", width=10**9, budget=12, max_new_tokens=4)
    assert run.round_lengths == kdlab.generate(tiny_pair(), PROMPT, budget=12, max_new_tokens=4).round_lengths


@pytest.mark.parametrize("stops", [np.array(5), 5, "5", [1.5], [[5]], [-1], [128], [True]], ids=repr)
def test_stop_tokens_of_another_form_are_refused(stops):
    with pytest.raises(ArgumentError, match="stop_token_ids: expected"):
        kdlab.generate(tiny_pair(), PROMPT, stop_token_ids=stops)


@pytest.mark.parametrize("stops", [{104}, (104,), np.array([104]), torch.tensor([104])], ids=repr)
def test_stop_tokens_may_be_any_collection(stops):
    listed = kdlab.generate(tiny_pair(), PROMPT, stop_token_ids=[104], max_new_tokens=30)
    assert kdlab.generate(tiny_pair(), PROMPT, stop_token_ids=stops, max_new_tokens=30).output_ids == listed.output_ids
