"""The draft field against live rounds: same text, same candidates at every anchor, the right tail and starts."""

import numpy as np
import pytest

import kdlab
from kdlab.errors import ArgumentError
from tests.pairs import golden_prompts, tiny_pair


def test_the_field_holds_what_live_rounds_drafted():
    run = kdlab.generate(tiny_pair(), golden_prompts(), budget=20, max_new_tokens=48)
    field = kdlab.record(tiny_pair(), golden_prompts(), top_k=20, max_new_tokens=48)
    assert (field.top_k, field.vocab_size, field.depth_limit) == (20, 128, 7)
    assert not field.whole_vocabulary
    for prompt, rounds in zip(field.prompts, run.rounds, strict=True):
        assert prompt.output_ids.tolist() == run.output_ids[prompt.prompt]
        for record in rounds:
            position = record.anchor_position - len(prompt.prompt_ids)
            depth, rank = record.tree.depth[0, 1:].numpy() - 1, record.tree.rank[0, 1:].numpy()
            assert np.array_equal(prompt.token_ids[position, depth, rank], record.tree.token[0, 1:].numpy())


def test_text_tail_and_ranks_fit_each_other():
    field = kdlab.record(tiny_pair(), golden_prompts(), top_k=500, max_new_tokens=40)
    assert field.top_k == field.vocab_size == 128
    assert field.whole_vocabulary
    longer = kdlab.generate(tiny_pair(), golden_prompts(), max_new_tokens=60)
    for prompt, text in zip(field.prompts, longer.output_ids, strict=True):
        assert prompt.num_starts == len(prompt.output_ids) == 40
        assert prompt.all_ids.tolist() == text[:48]
        ranked = np.take_along_axis(prompt.token_ids, prompt.next_rank[..., None], 2)[..., 0]
        assert np.array_equal(ranked, prompt.next_ids)
        found = np.take_along_axis(prompt.log_probs, prompt.next_rank[..., None], 2)[..., 0]
        assert np.array_equal(found, prompt.next_log_prob)
        assert np.allclose(np.exp(prompt.log_probs.astype(float)).sum(-1), 1, atol=1e-5)


def test_a_stop_ends_the_field_and_its_starts():
    whole = kdlab.record(tiny_pair(), golden_prompts()[:1], max_new_tokens=40).prompts[0]
    stop = int(whole.output_ids[17])
    first = whole.output_ids.tolist().index(stop)
    cut = kdlab.record(tiny_pair(), golden_prompts()[:1], max_new_tokens=40, stop_token_ids=[stop]).prompts[0]
    assert cut.output_ids.tolist() == whole.output_ids[: first + 1].tolist()
    assert cut.num_starts == first
    assert cut.all_ids.tolist() == whole.all_ids[: first + 9].tolist()


def test_sampled_text_is_recorded_with_its_own_noise():
    options = dict(max_new_tokens=30, temperature=0.8, top_p=0.95, seed=21)
    run = kdlab.generate(tiny_pair(), golden_prompts(), method="ar", **options)
    field = kdlab.record(tiny_pair(), golden_prompts(), **options)
    assert [prompt.output_ids.tolist() for prompt in field.prompts] == run.output_ids


def test_positions_do_not_depend_on_each_other(monkeypatch):
    """Drafting in groups of positions gives what one position at a time gives."""
    monkeypatch.setattr("kdlab.decode.recording._POSITIONS_AT_ONCE", 1)
    single = kdlab.record(tiny_pair(), golden_prompts()[:1], max_new_tokens=20).prompts[0]
    monkeypatch.setattr("kdlab.decode.recording._POSITIONS_AT_ONCE", 7)
    grouped = kdlab.record(tiny_pair(), golden_prompts()[:1], max_new_tokens=20).prompts[0]
    assert np.allclose(single.log_probs, grouped.log_probs, atol=1e-4)
    assert np.array_equal(single.next_rank, grouped.next_rank)


def test_recording_refuses_what_it_cannot_do():
    pair = kdlab.load_pair(kdlab.paths.DATA / "tiny-pair" / "target")
    with pytest.raises(ArgumentError, match="drafter"):
        kdlab.record(pair, "the ")
    for top_k in (0, -1, 1.5, True):
        with pytest.raises(ArgumentError, match="top_k"):
            kdlab.record(tiny_pair(), "the ", top_k=top_k)


def test_draft_topk_of_a_recorded_row_is_a_prefix_of_a_larger_k():
    small = kdlab.record(tiny_pair(), "the ", top_k=5, max_new_tokens=10).prompts[0]
    large = kdlab.record(tiny_pair(), "the ", top_k=50, max_new_tokens=10).prompts[0]
    assert np.array_equal(small.token_ids, large.token_ids[:, :, :5])
