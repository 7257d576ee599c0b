"""The drafter's context: streams of different lengths, one context for many blocks, and rows that must not matter."""

import pytest
import torch

from kdlab.errors import ArgumentError, ShapeError
from tests.model.drafters import SLIDING, at, draft, random_inputs, random_pair

SLIDING_7 = SLIDING | {"sliding_window": 7}


@pytest.mark.parametrize("changes", [{}, SLIDING_7], ids=["full", "sliding"])
def test_streams_of_different_lengths_equal_single_runs(changes):
    _, ours = random_pair(**changes)
    lengths = (0, 3, 17, 17)
    taps, block = random_inputs(ours, 17, streams=4)
    poisoned = taps.clone()
    for stream, length in enumerate(lengths):
        poisoned[stream, length:] = float("nan")
    context = ours.new_context(4, 20, "cpu", torch.float32)
    context.keys.fill_(float("nan"))
    context.values.fill_(float("nan"))
    ours.extend(context, poisoned, at(0, 0, 0, 0), at(*lengths))
    assert context.length.tolist() == list(lengths)
    got = ours(block, at(*lengths), context)
    for stream, length in enumerate(lengths):
        one = slice(stream, stream + 1)
        torch.testing.assert_close(got[one], draft(ours, taps[one], block[one], length), atol=1e-5, rtol=1e-5)


def test_streams_grow_at_their_own_pace():
    _, ours = random_pair()
    taps, block = random_inputs(ours, 12, streams=2)
    context = ours.new_context(2, 12, "cpu", torch.float32)
    starts = [0, 0]
    for counts in ((5, 1), (0, 4), (7, 0), (0, 7)):
        rows = torch.full((2, 7, taps.shape[-1]), float("nan"))
        for stream, count in enumerate(counts):
            rows[stream, :count] = taps[stream, starts[stream] : starts[stream] + count]
        ours.extend(context, rows, at(*starts), at(*counts))
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    got = ours(block, at(12, 12), context)
    for stream in range(2):
        one = slice(stream, stream + 1)
        torch.testing.assert_close(got[one], draft(ours, taps[one], block[one]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", [{}, SLIDING_7], ids=["full", "sliding"])
def test_many_blocks_share_one_context(changes):
    _, ours = random_pair(**changes)
    taps, block = random_inputs(ours, 15, streams=6)
    taps = taps[:1]
    context = ours.new_context(1, 15, "cpu", torch.float32)
    ours.extend(context, taps, at(0), at(15))
    starts = (15, 0, 1, 9, 8, 15)
    got = ours(block, at(*starts), context)
    for stream, start in enumerate(starts):
        want = draft(ours, taps[:, :start], block[stream : stream + 1])
        torch.testing.assert_close(got[stream : stream + 1], want, atol=1e-5, rtol=1e-5)


def test_a_draft_leaves_the_context_as_it_was():
    _, ours = random_pair()
    taps, block = random_inputs(ours, 9)
    context = ours.new_context(1, 30, "cpu", torch.float32)
    ours.extend(context, taps, at(0), at(9))
    keys, first = context.keys.clone(), ours(block, at(9), context)
    torch.testing.assert_close(context.keys, keys, atol=0, rtol=0)
    torch.testing.assert_close(ours(block, at(9), context), first, atol=0, rtol=0)


def test_a_slot_is_a_view_and_can_start_again():
    _, ours = random_pair()
    taps, block = random_inputs(ours, 9, streams=2)
    context = ours.new_context(2, 12, "cpu", torch.float32)
    ours.extend(context, taps, at(0, 0), at(9, 9))
    ours.extend(context.stream(1), taps[:1, :4], at(0), at(4))
    assert context.length.tolist() == [9, 4]
    got = ours(block, at(9, 4), context)
    torch.testing.assert_close(got[1:], draft(ours, taps[:1, :4], block[1:]), atol=1e-5, rtol=1e-5)
    with pytest.raises(ArgumentError, match="start"):
        ours(block, at(9, 9), context)  # rows 4..8 of stream 1 are the old text's


@pytest.mark.parametrize(
    ("start", "count", "message"),
    [
        ((0, 6), (1, 1), "start"),  # a gap after row 4
        ((-1, 0), (1, 1), "start"),
        ((0, 0), (6, 1), "count"),
        ((0, 0), (-1, 1), "count"),
        ((4, 4), (5, 5), "start \\+ count"),
    ],
)
def test_rows_that_do_not_fit_are_refused(start, count, message):
    _, ours = random_pair()
    taps, _ = random_inputs(ours, 5, streams=2)
    context = ours.new_context(2, 8, "cpu", torch.float32)
    ours.extend(context, taps, at(0, 0), at(4, 4))
    with pytest.raises(ArgumentError, match=message):
        ours.extend(context, taps, at(*start), at(*count))
    assert context.length.tolist() == [4, 4]


def test_a_context_without_rows_is_refused():
    _, ours = random_pair()
    _, block = random_inputs(ours, 5, streams=2)
    context = ours.new_context(2, 8, "cpu", torch.float32)
    with pytest.raises(ArgumentError, match="start"):
        ours(block, at(5, 0), context)
    with pytest.raises(ArgumentError, match="start"):
        ours(block, at(-1, 0), context)
    assert ours(block, at(0, 0), context).isfinite().all()


def test_shapes_are_checked():
    _, ours = random_pair()
    taps, block = random_inputs(ours, 5, streams=2)
    context = ours.new_context(2, 8, "cpu", torch.float32)
    with pytest.raises(ShapeError, match="taps"):
        ours.extend(context, taps[..., :128], at(0, 0), at(5, 5))
    with pytest.raises(ShapeError, match="count"):
        ours.extend(context, taps, at(0, 0), at(5))
    with pytest.raises(ShapeError, match="block"):
        ours(block[:, :7], at(0, 0), context)
    with pytest.raises(ShapeError, match="start"):
        ours(block, at(0), context)
    with pytest.raises(ArgumentError, match="context"):
        ours(block[:1].expand(3, -1, -1), at(0, 0, 0), context)
