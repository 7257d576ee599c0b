"""The coloured text: origins of tokens, and HTML that holds nothing but text."""

from html.parser import HTMLParser

import pytest
from matplotlib.colors import rgb_to_hsv, to_rgb

from kdlab.errors import ArgumentError
from kdlab.report.sanitize import sanitize_html
from kdlab.viz import text_html, token_origins
from kdlab.viz.text import Origin
from kdlab.viz.trees import FILL
from tests.viz.samples import TOKENIZER, Words, branched_record, make_run


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def read(html):
    reader = Reader()
    reader.feed(html)
    return reader


def test_origins_follow_the_rounds():
    origins = token_origins(make_run(), 0)
    assert [(origin.round, origin.depth) for origin in origins] == [(-1, 0), (0, 1), (0, 2), (0, 0), (1, 0)]
    assert token_origins(make_run(), 1)[0].name.startswith("first token")


def test_an_output_cut_inside_a_round_is_cut():
    run = make_run([[branched_record()]], [[ord(char) for char in "ab"]])
    assert len(token_origins(run, 0)) == 2


def test_rounds_that_spell_another_text_are_refused():
    run = make_run([[branched_record()]], [[ord(char) for char in "abcz"]])
    with pytest.raises(ArgumentError, match="spell"):
        token_origins(run, 0)
    with pytest.raises(ArgumentError, match="prompt"):
        token_origins(run, 1)


def test_html_is_escaped_and_keeps_its_colours_in_the_report():
    html = text_html(make_run(), 0, TOKENIZER)
    assert read(html).text.endswith("abyz<")
    assert read(html).tags == {"div", "p", "span", "pre"}
    kept = sanitize_html(html)
    assert kept.count("background-color:") == html.count("background-color:") > 5


def test_chips_of_the_legend_stay_whole_and_depth_has_a_hue_of_its_own():
    html = text_html(make_run(), 0, TOKENIZER)
    legend, text = html.split("<pre")
    assert legend.count("display:inline-block;white-space:nowrap") == legend.count("<span") == 4
    assert "inline-block" not in text
    assert "not a probability" in legend
    assert sanitize_html(html).count("display:inline-block") == 4
    deep = rgb_to_hsv(to_rgb(Origin(0, 8).fill))[0]
    assert abs(deep - rgb_to_hsv(to_rgb(FILL))[0]) > 0.2
    plain = text_html(make_run([[]], [[97]]), 0, TOKENIZER)
    assert "probability" not in plain


def test_hostile_tokens_stay_text():
    words = ["<script>alert(1)</script>", "\"'><img src=x onerror=y>", "\n", "\u202e", "�"] + ["w"] * 123
    run = make_run([[]], [[0]])
    for token in range(5):
        run.output_ids[0][:] = [token]
        reader = read(text_html(run, 0, Words(words)))
        assert reader.tags <= {"div", "p", "span", "pre"}
    run.output_ids[0][:] = [2]
    assert read(text_html(run, 0, Words(words))).text.endswith("↵\n")
