"""The round viewer, driven as a browser would: by setting the traits of its controls."""

import pytest

from kdlab.errors import ArgumentError
from kdlab.viz import RoundViewer
from tests.viz.samples import TOKENIZER, branched_record, make_record, make_run

PNG = b"\x89PNG"


def two_prompts():
    second = [make_record("<q", [-1, 0], (0, 1), "z", index=0, prompt=1)]
    outputs = [[ord(char) for char in "abyz"], [ord(char) for char in "<qz"]]
    return make_run([[branched_record(), make_record("zq", [-1, 0], (0,), "<", index=1)], second], outputs)


def test_the_slider_changes_drawing_and_words_in_place():
    viewer = RoundViewer(two_prompts(), TOKENIZER)
    image, before = viewer.drawing, bytes(viewer.drawing.value)
    assert before.startswith(PNG)
    assert "Round 0" in viewer.words.value
    viewer.round.value = 1
    assert viewer.drawing is image
    assert bytes(viewer.drawing.value).startswith(PNG)
    assert bytes(viewer.drawing.value) != before
    assert "Round 1" in viewer.words.value
    assert "&lt;" in viewer.words.value
    assert "<p>" in viewer.words.value


def test_another_prompt_starts_at_its_first_round():
    viewer = RoundViewer(two_prompts(), TOKENIZER)
    for at in (0, 1):
        viewer.prompt.value = 0
        viewer.round.value = at
        viewer.prompt.value = 1
        assert (viewer.round.value, viewer.round.max) == (0, 0)
        assert viewer.record.prompt == 1
        assert "q" in viewer.words.value


def test_prompts_without_rounds_are_not_offered():
    run = make_run()
    viewer = RoundViewer(run, TOKENIZER)
    assert [value for _, value in viewer.prompt.options] == [0]
    with pytest.raises(ArgumentError, match="round"):
        RoundViewer(make_run([[]], [[97]]), TOKENIZER)


def test_the_static_twin_shows_chosen_rounds():
    viewer = RoundViewer(two_prompts(), TOKENIZER)
    assert len([ax for ax in viewer.static().axes if ax.axison]) == 2
    (ax,) = [ax for ax in viewer.static([1], prompt=0).axes if ax.axison]
    assert "Round 1" in ax.get_title(loc="left")
