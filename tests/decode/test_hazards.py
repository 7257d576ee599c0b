"""Faults that only a whole decode shows: prefill in chunks, a draft context left behind, taps one layer off."""

import dataclasses

import pytest
import torch

import kdlab
from kdlab.decode import decoding, engine
from kdlab.paths import DATA
from tests.decode.ar_oracle import Oracle
from tests.pairs import golden_prompts, tiny_pair

LONG = "the cat sees the hill. " * 25  # 575 tokens: two chunks, and positions past YaRN's original window


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 64])
def test_prefill_in_chunks_of_any_size_gives_the_same_rounds(chunk, monkeypatch):
    options = dict(budget=9, max_new_tokens=16)
    whole = kdlab.generate(tiny_pair(), golden_prompts(), **options)
    monkeypatch.setattr(engine, "PREFILL_CHUNK", chunk)
    parts = kdlab.generate(tiny_pair(), golden_prompts(), **options)
    assert parts.output_ids == whole.output_ids
    assert parts.round_lengths == whole.round_lengths


def test_a_prompt_of_more_than_one_chunk_equals_the_oracle():
    prompt = LONG[:560]
    assert len(prompt) > engine.PREFILL_CHUNK
    run = kdlab.generate(tiny_pair(), [prompt, "5+40"], budget=12, max_new_tokens=10, stop_token_ids=[])
    oracle = Oracle(DATA / "tiny-pair" / "target")
    assert run.output_ids[0] == oracle.decode([ord(letter) for letter in prompt], 10)
    assert run.output_ids[1] == kdlab.generate(tiny_pair(), "5+40", method="ar", max_new_tokens=10).output_ids[0]


def test_the_draft_context_is_as_long_as_the_committed_text():
    running = decoding.start(tiny_pair(), golden_prompts(), budget=6, max_new_tokens=24, streams=2)
    while not running.done:
        running.step()
        streams = running.round.streams
        slots = streams.prompt >= 0
        assert torch.equal(running.round.context.length[slots], streams.start[slots])


def tokens_per_round(layers):
    pair = tiny_pair()
    drafter = kdlab.load_pair("tiny").drafter
    drafter.config = dataclasses.replace(drafter.config, target_layer_ids=layers)
    run = kdlab.generate(dataclasses.replace(pair, drafter=drafter), golden_prompts(), budget=8, max_new_tokens=48)
    lengths = [length for lengths in run.round_lengths for length in lengths]
    return sum(lengths) / len(lengths), run.output_ids


def test_taps_one_layer_off_draft_worse_and_never_change_the_text():
    right, text = tokens_per_round((0, 2))
    for shifted in ((1, 3), (0, 3), (1, 2), (2, 0)):
        worse, same_text = tokens_per_round(shifted)
        assert same_text == text
        assert worse < right - 0.2, shifted
