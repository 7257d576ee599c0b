"""Where an output ends: stop tokens, the cap, the context limit; and which rounds count."""

import dataclasses

import pytest

import kdlab
from kdlab.decode.transcript import Transcript
from kdlab.errors import ArgumentError
from tests.pairs import golden_prompts, tiny_pair

PROMPT = "the cat sees the "
METHODS = [dict(method="ar"), dict(method="chain"), dict(budget=16), dict(method="beam", width=2)]
STOP = 5


def transcript(tokens, cap, tail=0):
    result = Transcript([1], cap, "length", frozenset({STOP}), tail)
    result.extend(tokens[:1])
    result.extend(tokens[1:])
    return result


def test_a_stop_wins_over_the_cap():
    done = transcript([7, 8, STOP, 9, 9, 4], 4)
    assert (done.output_ids, done.finish, done.num_starts) == ([7, 8, STOP], "stop", 2)


def test_a_stop_past_the_cap_does_not_count():
    done = transcript([7, 8, 1, 9, 9, STOP], 4)
    assert (done.output_ids, done.finish, done.num_starts) == ([7, 8, 1, 9], "length", 4)


def test_a_stop_on_the_caps_last_token_counts():
    done = transcript([7, 8, 1, STOP, 9], 4)
    assert (done.output_ids, done.finish, done.num_starts) == ([7, 8, 1, STOP], "stop", 3)


def test_the_tail_follows_the_cut():
    assert not transcript([7, STOP, 9], 4, tail=2).done
    assert transcript([7, STOP, 9, 1, 3], 4, tail=2).tail_ids == [9, 1]


@pytest.mark.parametrize("options", METHODS, ids=str)
def test_a_stop_token_ends_the_output_wherever_it_comes(options):
    """First token, inside a path, last of a path, bonus: each produced token is tried as the stop in turn."""
    pair = tiny_pair()
    whole = kdlab.generate(pair, PROMPT, max_new_tokens=40, **options)
    for token in dict.fromkeys(whole.output_ids[0]):
        cut = whole.output_ids[0].index(token) + 1
        run = kdlab.generate(pair, PROMPT, max_new_tokens=40, stop_token_ids=[token], **options)
        assert run.output_ids[0] == whole.output_ids[0][:cut]
        assert run.finish == ["stop"]
        first = len(run.prompt_ids[0])
        kept = [r for r in whole.rounds[0] if r.anchor_position - first < cut - 1]
        assert run.round_lengths[0] == [r.num_tokens for r in kept]


@pytest.mark.parametrize("options", METHODS, ids=str)
@pytest.mark.parametrize("cap", [1, 2, 7, 8, 9, 23])
def test_the_cap_cuts_the_output_and_rounds_start_before_it(options, cap):
    whole = kdlab.generate(tiny_pair(), PROMPT, max_new_tokens=64, **options)
    run = kdlab.generate(tiny_pair(), PROMPT, max_new_tokens=cap, **options)
    assert run.output_ids[0] == whole.output_ids[0][:cap]
    assert run.finish == ["length"]
    first = len(run.prompt_ids[0])
    assert all(record.anchor_position - first < cap for record in run.rounds[0])
    assert run.round_lengths[0] == whole.round_lengths[0][: len(run.rounds[0])]
    assert sum(run.round_lengths[0]) >= cap


@pytest.mark.parametrize("room", [1, 2, 9, 30])
def test_the_context_limit_is_reached_cleanly(room):
    pair = tiny_pair()
    limit = len(PROMPT) + room
    config = dataclasses.replace(pair.target.config, max_position_embeddings=limit)
    whole = kdlab.generate(pair, PROMPT, max_new_tokens=64)
    saved, pair.target.config = pair.target.config, config
    try:
        run = kdlab.generate(pair, PROMPT, max_new_tokens=64)
        with pytest.raises(ArgumentError, match=f"fewer than {limit} tokens"):
            kdlab.generate(pair, PROMPT + "x" * room, max_new_tokens=1)
    finally:
        pair.target.config = saved
    assert run.output_ids[0] == whole.output_ids[0][:room]
    assert run.finish == ["context"]


def test_tokens_are_accepted_draft_tokens_plus_one():
    run = kdlab.generate(tiny_pair(), golden_prompts(), max_new_tokens=48, budget=16)
    for i, rounds in enumerate(run.rounds):
        text, position = run.output_ids[i], 0
        for index, record in enumerate(rounds):
            assert record.prompt == i
            assert record.round == index
            assert record.anchor_position == len(run.prompt_ids[i]) + position
            assert record.tree.token[0, 0] == text[position]
            assert record.num_tokens == len(record.accepted_tokens) + 1
            wrote = [*record.accepted_tokens, record.bonus]
            assert text[position + 1 : position + 1 + len(wrote)] == wrote[: len(text) - position - 1]
            position += record.num_tokens
        assert run.tokens_per_round[i] == pytest.approx(position / len(rounds))
