"""Findings as plain sentences, for the report's summary and the terminal."""

from kdlab.viz import plain_sentences


def test_markdown_findings_become_plain_sentences():
    assert plain_sentences("**Too close** to call.", "- a: **+3 %**\n\n- b: -1 %") == [
        "Too close to call.",
        "a: +3 %",
        "b: -1 %",
    ]
