"""Rounds that end by themselves: the device's end against the transcript's, rounds read late, rounds after the end."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kdlab
from kdlab.decode import decoding, engine, methods
from kdlab.decode.methods import make_method
from kdlab.decode.round import Round
from kdlab.decode.round_buffer import Mailbox, RoundBuffer
from kdlab.decode.settings import _check_graph
from kdlab.decode.streams import Streams
from kdlab.decode.transcript import Transcript
from kdlab.errors import KdlabError, NotSupported
from kdlab.kernels import jit
from kdlab.model.target import Target
from kdlab.tree import Acceptance, DraftTree, accept
from tests.decode.rounds import assert_same_record, assert_same_rounds, assert_same_tree
from tests.pairs import golden_prompts, tiny_pair

PROMPTS = ["the ", *golden_prompts(), "the robot sees the farmer at the park. 5+5=10; "]
CPU = torch.device("cpu")
OPTIONS = [
    dict(method="ar", streams=2),
    dict(method="chain", streams=3),
    dict(budget=12, streams=1),
    dict(budget=12, streams=3, stop_token_ids=[ord("="), ord(".")]),
    dict(budget=9, streams=2, record_experts=True, temperature=0.9, top_p=0.9, seed=4),
    dict(method="beam", width=3, streams=4),
]


# -- when a stream ends ------------------------------------------------------------------------------------------------


def random_round(generator, length_limit=4, vocab=6):
    """A chain of `length_limit` nodes, and the target's agreement with a random part of it."""
    token = torch.randint(vocab, (1, length_limit + 1), generator=generator, dtype=torch.int32)
    length = int(torch.randint(length_limit + 1, (1,), generator=generator))
    path = torch.full((1, length_limit + 1), -1, dtype=torch.int32)
    path[0, : length + 1] = torch.arange(length + 1)
    bonus = torch.randint(vocab, (1,), generator=generator, dtype=torch.int32)
    good = torch.zeros(1, dtype=torch.int32)
    return token, Acceptance(path, torch.tensor([length], dtype=torch.int32), bonus, good)


@pytest.mark.parametrize("tail", [0, 3, 9])
@pytest.mark.parametrize("seed", range(12))
def test_a_stream_ends_where_the_transcript_ends(seed, tail):
    """Caps and stops of all kinds: the first token, inside a path, the bonus, on the cap, past it, in the tail."""
    generator = torch.Generator().manual_seed(seed)
    for cap in (1, 2, 5, 6, 20):
        transcript = Transcript([1, 1, 1], cap, "length", frozenset({0, 5}), tail)
        transcript.extend([int(torch.randint(6, (1,), generator=generator))])
        streams = Streams.allocate(2, 6, transcript.stop_token_ids, tail, CPU)
        if transcript.done:
            continue
        streams.admit(1, 7, transcript)
        while not transcript.done:
            assert streams.running.tolist() == [False, True]
            token, accepted = random_round(generator)
            both = {f.name: getattr(accepted, f.name).repeat_interleave(2, 0) for f in dataclasses.fields(accepted)}
            commit = streams.advance(token.repeat(2, 1), Acceptance(**both))
            length = int(accepted.length[0])
            transcript.extend([*token[0, 1 : length + 1].tolist(), int(accepted.bonus)])
            assert commit.num_rows.tolist() == [0, length + 1]
            assert commit.path.tolist() == [[-1] * 5, accepted.path[0].tolist()]
            assert streams.num_tokens.tolist() == [0, len(transcript.tokens)]
            assert streams.start.tolist() == [0, 2 + len(transcript.tokens)]
            assert streams.anchor.tolist() == [0, transcript.tokens[-1]]
        assert not streams.running.any()
        assert (int(streams.stop[1]) >= cap) == (transcript.stop is None)


def test_a_stream_that_failed_rests_as_it_was_and_the_others_go_on():
    transcript = Transcript([1, 1], 20, "length", frozenset())
    transcript.extend([3])
    streams = Streams.allocate(3, 6, frozenset(), 0, CPU)
    for slot in range(3):
        streams.admit(slot, slot, transcript)
    path = torch.tensor([[0, 1], [-1, -1], [0, 1]], dtype=torch.int32)
    length, bonus, status = (torch.tensor(v, dtype=torch.int32) for v in ([1, 0, 1], [2, -1, -1], [0, 3, 0]))
    commit = streams.advance(torch.tensor([[3, 4]] * 3, dtype=torch.int32), Acceptance(path, length, bonus, status))
    assert commit.path.tolist() == [[0, 1], [-1, -1], [-1, -1]]
    assert streams.running.tolist() == [True, False, False]
    assert streams.start.tolist() == [4, 2, 2]
    assert streams.anchor.tolist() == [2, 3, 3]
    assert streams.num_tokens.tolist() == [3, 1, 1]


# -- rounds that are read late -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_records_read_late_are_the_same_records(options, monkeypatch):
    """What captured rounds do: rounds that were launched before the host knew of an end find the stream at rest."""
    options = {"max_new_tokens": 24} | options
    at_once = kdlab.generate(tiny_pair(), PROMPTS, **options)
    monkeypatch.setattr(engine, "ROUNDS_AHEAD", {"eager": 2 if options["streams"] == 3 else 1})
    assert_same_rounds(kdlab.generate(tiny_pair(), PROMPTS, **options), at_once, atol=1e-4)


def test_a_field_recorded_late_is_the_same_field(monkeypatch):
    options = dict(max_new_tokens=20, streams=2, stop_token_ids=[ord(".")])
    at_once = kdlab.record(tiny_pair(), PROMPTS, **options)
    monkeypatch.setattr(engine, "ROUNDS_AHEAD", {"eager": 1})
    late = kdlab.record(tiny_pair(), PROMPTS, **options)
    for ours, theirs in zip(late.prompts, at_once.prompts, strict=True):
        assert ours.all_ids.tolist() == theirs.all_ids.tolist()
        assert np.array_equal(ours.token_ids, theirs.token_ids)


def test_rounds_after_the_end_change_nothing():
    running = decoding.start(tiny_pair(), PROMPTS[:3], budget=8, max_new_tokens=12)
    decoding.run_all(running)
    done = running.round
    live = [done.context.keys[:, :, :-1], done.context.length]
    live += [getattr(done.streams, field.name) for field in dataclasses.fields(done.streams) if field.name != "tail"]
    before = [tensor.clone() for tensor in live]
    for _ in range(3):
        done.run()
    assert all(torch.equal(tensor, old) for tensor, old in zip(live, before, strict=True))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_stream_at_rest_that_should_run_is_an_error_and_no_endless_loop(ahead, monkeypatch):
    monkeypatch.setattr(engine, "ROUNDS_AHEAD", {"eager": ahead})
    running = decoding.start(tiny_pair(), PROMPTS[:2], budget=8, max_new_tokens=40)
    running.step()
    running.round.streams.running[1] = False
    with pytest.raises(KdlabError, match="prompt 1: its stream rests"):
        decoding.run_all(running)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_malformed_tree_ends_the_decode_with_the_place(ahead, monkeypatch):
    monkeypatch.setattr(engine, "ROUNDS_AHEAD", {"eager": ahead})
    build = methods.build_best_first

    def malformed(*args, **options):
        tree = build(*args, **options)
        tree.parent[1, 2] = 7
        return tree

    monkeypatch.setattr(methods, "build_best_first", malformed)
    with pytest.raises(KdlabError, match=r"^prompt 1, round at position 17: a malformed tree \(status 2\)$"):
        kdlab.generate(tiny_pair(), PROMPTS[:3], budget=4)


# -- what the host gets ------------------------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was_written():
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 3, 6, 8] + [-1] * 30, [-1, *range(33)] + [-1] * 6])
    token = torch.where(torch.arange(40) < torch.tensor([[10], [34]]), torch.arange(40), -1)
    tree = DraftTree.from_parents(token, parents, torch.where(parents < 0, 0.0, -0.25 * token.float()))
    tree = dataclasses.replace(
        tree,
        missed_mass=torch.rand(2, tree.depth_limit),
        truncated=torch.tensor([True, False]),
        nonfinite_rows=torch.tensor([0, 3], dtype=torch.int32),
    )
    target = torch.arange(80, dtype=torch.int32).view(2, 40) - 1
    target[1, :34] = torch.arange(1, 35)
    accepted = accept(tree, target)
    places = dict(prompt=torch.tensor([4, 2]), start=torch.tensor([9, 70_000]))
    streams = SimpleNamespace(**places, running=torch.ones(2, dtype=torch.bool))
    experts = torch.arange(2 * 3 * 40 * 2).view(2, 3, 40, 2).to(torch.int16)
    buffer = RoundBuffer(2, 40, tree.depth_limit, CPU, (3, 2))
    buffer.write(streams, tree, target, accepted, experts)
    fields = buffer.read(buffer.words.numpy().copy())
    for slot, (prompt, rows) in enumerate([(4, 10), (2, 34)]):
        record = buffer.record(fields, slot, 5, buffer.expert_ids.numpy())
        assert_same_tree(record.tree, tree.stream(slot))
        assert (record.prompt, record.round, record.anchor_position) == (prompt, 5, streams.start[slot])
        assert np.array_equal(record.target_tokens, target[slot, :rows])
        assert np.array_equal(record.expert_ids, experts[slot, :, :rows])
        assert record.path == tuple(accepted.path[slot, : accepted.length[slot] + 1].tolist())
        assert (record.bonus, record.nonfinite_draft_rows) == (accepted.bonus[slot], 3 * slot)
    assert record.num_tokens == 34
    buffer.words.zero_()
    assert_same_tree(record.tree, tree.stream(1))  # it kept a copy
    with pytest.raises(AssertionError):
        assert_same_record(record, dataclasses.replace(record, target_tokens=record.target_tokens + 1))


def test_posts_come_back_in_order_and_untouched_by_what_the_device_writes_next():
    source = torch.zeros(2, 3, dtype=torch.int32)
    box, seen = Mailbox([source], 2), []
    for value in range(5):
        source.fill_(value)
        box.post()
        if len(box) == 2:
            seen.append(box.take()[0].copy())
    assert [int(array[0, 0]) for array in seen] == [0, 1, 2, 3]
    assert len(box) == 1


def test_a_post_is_recorded_on_the_stream_that_copies_it(monkeypatch):
    """A pair may be on another GPU than the current one, whose stream would be done before the copy is."""
    box, recorded = Mailbox([torch.zeros(2)], 1), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    box._sources = [SimpleNamespace(device=torch.device("cuda:1"))]
    box._copies = [[SimpleNamespace(copy_=lambda *_, **__: None)]]
    box._written = [SimpleNamespace(record=lambda stream=None: recorded.append(stream))]
    box.post()
    assert recorded == [torch.device("cuda:1")]


# -- the host's loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_engine_that_begins_again_decodes_the_same(ahead, monkeypatch):
    monkeypatch.setattr(engine, "ROUNDS_AHEAD", {"eager": ahead})
    running = decoding.start(tiny_pair(), PROMPTS, budget=8, max_new_tokens=16, streams=2)
    for _ in range(3):
        running.step()
    running.restart()
    assert not running.done
    assert running.num_running == 0
    decoding.run_all(running)
    alone = kdlab.generate(tiny_pair(), PROMPTS, budget=8, max_new_tokens=16, streams=2)
    assert_same_rounds(decoding.collect(running), alone, atol=1e-4)


def test_prompts_wait_until_they_are_admitted():
    running = decoding.start(tiny_pair(), PROMPTS[:3], budget=8, max_new_tokens=6, streams=1)
    while running.num_running:
        running.step(admit=False)
    assert (running.num_done, running.done) == (1, False)
    running.admit()
    assert running.num_running == 1
    decoding.run_all(running)
    assert running.num_done == 3


GPU_PAIR = SimpleNamespace(device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("method", "options", "op_impl", "captured"),
    [
        ("ar", {}, "auto", True),
        ("ar", {}, "reference", False),  # plain torch's experts wait for the host
        ("chain", {}, "auto", True),
        ("chain", {"top_k": 256}, "auto", True),
        ("chain", {"budget": 5000}, "auto", True),  # no longer than the drafter's slots
        ("ddtree", {}, "auto", True),
        ("ddtree", {"budget": 1024, "top_k": 256}, "auto", True),
        ("ddtree", {"budget": 1025, "top_k": 256}, "auto", False),
        ("ddtree", {"budget": 257}, "auto", False),
        ("beam", {"width": 2}, "auto", False),
    ],
    ids=str,
)
def test_which_rounds_a_gpu_captures(method, options, op_impl, captured):
    sizes = {"budget": 31, "width": None, "top_k": None, "depth_limit": 7, "vocab_size": 3072}
    made = make_method(method, impl=op_impl, **sizes | options)
    assert _check_graph(GPU_PAIR, "auto", made, op_impl) is captured
    assert _check_graph(GPU_PAIR, "off", made, op_impl) is False
    if captured:
        assert _check_graph(GPU_PAIR, "on", made, op_impl) is True
    else:
        with pytest.raises(NotSupported, match="graph"):
            _check_graph(GPU_PAIR, "on", made, op_impl)


def test_prefill_and_every_eager_round_look_at_the_sources_once(monkeypatch):
    blocks, run, target = [], Round._run, Target.forward

    def noted(name, call):
        def wrapper(*args, **options):
            blocks.append((name, jit._block.token))
            return call(*args, **options)

        return wrapper

    monkeypatch.setattr(Round, "_run", noted("round", run))
    monkeypatch.setattr(Target, "forward", noted("forward", target))
    kdlab.generate(tiny_pair(), PROMPTS[:1], max_new_tokens=4)
    assert {name for name, _ in blocks} == {"round", "forward"}
    assert all(token is not None for _, token in blocks)
    assert len({token for name, token in blocks if name == "round"}) == sum(name == "round" for name, _ in blocks)
    assert jit._block.token is None
