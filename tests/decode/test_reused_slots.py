"""Streams that take over the slot of a finished one."""

import kdlab
from tests.pairs import tiny_pair


def test_a_prompt_that_ends_at_once_in_a_used_slot_disturbs_nobody():
    prompts = ["the cat sees the ", "the king calls the ship at the harbor. 12+30=42; 7+", "5+40"]
    options = {"budget": 8, "max_new_tokens": 40, "stop_token_ids": [ord("=")]}
    run = kdlab.generate(tiny_pair(), prompts, streams=2, **options)
    assert run.output_ids[2] == [ord("=")]
    alone = kdlab.generate(tiny_pair(), prompts[0], **options)
    assert run.round_lengths[0] == alone.round_lengths[0]
    assert run.output_ids[0] == alone.output_ids[0]
