"""What a notebook concludes stands first in the report, as text."""

import importlib.metadata

import nbformat
import pytest
from nbformat import v4

from kdlab.errors import ArgumentError, KdlabError
from kdlab.report import build_report, conclusions, show_result
from kdlab.report.outcome import RESULT_MIME


def save(folder, name, **record):
    result = v4.new_output("display_data", data={RESULT_MIME: record | {"final": True, "provenance": {"seed": 0}}})
    cell = v4.new_code_cell("show()", outputs=[result], metadata={"papermill": {"status": "completed"}})
    path = folder / f"{name}.ipynb"
    nbformat.write(v4.new_notebook(cells=[v4.new_markdown_cell("# Body"), cell]), path)
    return path


def test_conclusions_are_a_sentence_or_a_list_of_them():
    assert conclusions({}) == conclusions({"conclusion": None}) == conclusions({"conclusion": []}) == []
    assert conclusions({"conclusion": "one"}) == ["one"]
    assert conclusions({"conclusion": ["one", "two"]}) == ["one", "two"]
    for wrong in (3, ["one", 2], {"one": "two"}, False):
        with pytest.raises(ArgumentError, match="text or a list of texts"):
            conclusions({"conclusion": wrong})
        with pytest.raises(ArgumentError, match="text or a list of texts"):
            show_result({"conclusion": wrong, "final": True})


def test_title_and_conclusions_come_first_and_are_escaped(tmp_path):
    first = save(tmp_path, "00_a", conclusion="a <script>alert(1)</script> & b")
    second = save(tmp_path, "10_b", conclusion=["best is 15", "chain is 7"])
    silent = save(tmp_path, "20_c")
    html = build_report([first, second, silent], tmp_path / "x.html", title="A & <b>").read_text()
    body = html.split("<body>")[1]
    assert "<h1>A &amp; &lt;b&gt;</h1>" in body
    box = body[body.index('<div class="summary">') : body.index("</div>")]
    assert body.index("<h1>A") < body.index(box) < body.index(">Body<")
    assert "<li>a &lt;script&gt;alert(1)&lt;/script&gt; &amp; b</li>" in box
    assert '<a href="#part-2">10_b</a></p>\n<ul><li>best is 15</li><li>chain is 7</li></ul>' in box
    assert "20_c" not in box
    assert body.count("alert(1)") == body.count("best is 15") == 1
    assert "summary\"" not in build_report([silent], tmp_path / "y.html").read_text()


def test_without_the_extra_a_report_names_it(tmp_path, monkeypatch):
    version = importlib.metadata.version

    def lacking(name):
        if name == "nh3":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("importlib.metadata.version", lacking)
    with pytest.raises(KdlabError, match=r"extra `report` \(nbconvert, nh3\), and nh3 is not installed"):
        build_report([save(tmp_path, "00_a")], tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()
