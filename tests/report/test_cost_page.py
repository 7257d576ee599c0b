"""The pages' words on whether a tree pays are those of the recorded files."""

import pytest

from kdlab.bench.full_width import evidence as sources
from kdlab.errors import ArgumentError
from kdlab.report import cost_page


@pytest.fixture(scope="module")
def page():
    return cost_page.CostPage(sources.load_evidence())


def test_the_pages_say_what_is_recorded(page, tmp_path, monkeypatch, capsys):
    for path in cost_page.PAGES:
        text = path.read_text(encoding="utf-8")
        assert text == page.fill(text), "make cost writes them anew"
        assert text.count("<!-- cost: ") > 0
    typed = text.replace(" points", " places", 1)
    assert typed != text
    copy = tmp_path / "page.md"
    copy.write_text(typed, encoding="utf-8")
    monkeypatch.setattr(cost_page, "load_evidence", lambda: page.evidence)
    monkeypatch.setattr(cost_page, "CostPage", lambda found: page)
    assert cost_page.main([str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == text
    assert "written" in capsys.readouterr().out


def test_an_unknown_place_is_named(page):
    with pytest.raises(ArgumentError, match="place"):
        page.fill("<!-- cost: nothing -->\n<!-- end -->")
