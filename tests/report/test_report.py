"""The report: one harmless file, the same bytes for the same notebooks, nothing of a widget without its static twin."""

import base64
import re
from html.parser import HTMLParser

import nbformat
import pytest
from nbformat import v4

from kdlab.errors import ArgumentError, NotebookError
from kdlab.report import build_report, export_figures, read_notebook, read_outcome
from kdlab.report.cells import render_notebook
from kdlab.report.figures import FIGURE_KEY
from kdlab.report.outcome import RESULT_MIME
from kdlab.report.sanitize import sanitize_html

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 40).decode()
WIDGET_VIEW = {"application/vnd.jupyter.widget-view+json": {"model_id": "m"}, "text/plain": "IntSlider(value=3)"}
ATTACKS = [
    "<script>alert(1)</script>",
    "<script/src=//evil.example/x.js>",
    "<img src=x onerror=alert(1)>",
    '<img src="data:image/svg+xml;base64,PHN2Zz4=">',
    '<img src="data:text/html;base64,PHNjcmlwdD4=">',
    '<img src="data:image/png,raw">',
    '<img src="data:image/png;base64,AAAA" srcset="//evil.example/x 2x">',
    '<a href="javascript:alert(1)">x</a>',
    '<a href="&#106;ava\tscript:alert(1)">x</a>',
    '<a href="data:text/html;base64,PHNjcmlwdD4=">x</a>',
    '<a href="//evil.example">x</a>',
    '<a href="https://evil.example/">x</a>',
    "</style><script>alert(1)</script>",
    "</title></section></main><iframe srcdoc='<script>1</script>'></iframe>",
    "<svg><style><img src=x onerror=alert(1)></style></svg>",
    "<svg onload=alert(1)>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
    "<noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
    '<p style="background:url(//evil.example/x)">x</p>',
    '<p style="color:red;background:\nurl(//evil.example/x)">x</p>',
    '<p style="back\\67round:url(//evil.example/x);behavior:url(#x)">x</p>',
    '<p style="background-color:url(//evil.example/x)">x</p>',
    '<p style="color:\\75rl(//evil.example/x)">x</p>',
    '<p style="position:fixed;top:0;z-index:9;--x:url(//evil.example/x)">x</p>',
    '<p style="list-style-image:url(//evil.example/x);content:url(//evil.example/x)">x</p>',
    '<p style="}</style><script>alert(1)</script>">x</p>',
    '<h2 id="provenance" class="x" onclick="alert(1)">x</h2>',
    '<p title="a&quot; onclick=&quot;alert(1)">x</p>',
    "<link rel=stylesheet href=//evil.example><meta http-equiv=refresh content='0;url=//evil.example'>",
    "<base href=//evil.example><form action=//evil.example><input autofocus onfocus=alert(1)>",
    "<<script>script>alert(1)<</script>/script>",
    "<!--><script>alert(1)</script>-->",
    "<![CDATA[<script>alert(1)</script>]]>",
    "<textarea></div><script>alert(1)</script>",
    "<plaintext>",
    "<scr\0ipt>alert(1)</scr\0ipt>",
]


class Reader(HTMLParser):
    """Collect tags and attributes as a parser sees them, and check that every tag is closed where it should be."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.open, self.text = [], [], [], ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "img", "br", "hr", "col"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def assert_harmless(html):
    reader = Reader(html)
    assert reader.open == []
    assert not {"script", "iframe", "object", "embed", "link", "svg", "math", "form", "input"} & set(reader.tags)
    for tag, name, value in reader.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in ("srcdoc", "action", "srcset"), (tag, name)
        if name == "style":
            assert not re.search(r"url|expression|position|/", value)
        if name == "src":
            assert value.startswith("data:image/png;base64,")
        if name == "id":
            assert value.startswith("part-") or (tag, value) == ("section", "provenance")
        if name == "href":
            assert value.startswith("#")
    return reader


def finished(*cells, final=True, provenance=None, **more):
    record = {"final": final, "provenance": provenance or {}, **more}
    last = v4.new_code_cell("show()", outputs=[v4.new_output("display_data", data={RESULT_MIME: record})])
    cells = [*cells, last]
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
        if cell.cell_type == "code":
            cell.metadata["papermill"] = {"status": "completed"}
    return v4.new_notebook(cells=cells)


def output(**data):
    return v4.new_output("display_data", data={name.replace("__", "/"): value for name, value in data.items()})


def render(*cells):
    return render_notebook(v4.new_notebook(cells=list(cells)), "part-1-")


def render_markdown(text):
    return render(v4.new_markdown_cell(text))


def save(notebook, folder, name="demo"):
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_in_an_output_can_run_load_or_break_out(attack):
    assert_harmless(sanitize_html(attack, "part-1-"))
    assert_harmless(sanitize_html(f"<table><tr><td>{attack}</td></tr></table>", "part-1-"))
    assert_harmless(render_markdown(f"# Title\n\n{attack}\n\n[x]({attack}) ![x]({attack}) `{attack}` ${attack}$\n"))
    every = [
        output(text__html=attack), output(text__markdown=attack), output(text__plain=attack),
        output(image__png=PNG + attack, text__plain=attack), v4.new_output("stream", text=attack),
        output(image__svg=attack, application__javascript=attack, text__latex=attack),
        v4.new_output("display_data", data={"image/png": PNG}, metadata={"image/png": {"alt": attack}}),
        v4.new_output("error", ename=attack, evalue=attack, traceback=[attack]),
    ]  # fmt: skip
    assert_harmless(render(v4.new_code_cell("", outputs=every), v4.new_raw_cell(attack)))


def test_a_whole_page_of_attacks_is_harmless(tmp_path):
    cells = [v4.new_markdown_cell(attack) for attack in ATTACKS]
    cells += [v4.new_code_cell(attack, outputs=[output(text__html=attack)]) for attack in ATTACKS]
    notebook = finished(*cells, provenance={attack: attack for attack in ATTACKS})
    path = build_report([save(notebook, tmp_path)], tmp_path / "x.html", title="</title><script>alert(1)</script>")
    html = path.read_text()
    reader = assert_harmless(html.split("<body>", 1)[1].split("</body>")[0])
    assert "alert(1)" in reader.text  # as text, in the provenance
    assert "<script" not in html
    assert "default-src 'none'" in html


def test_the_checks_of_this_file_see_what_was_not_sanitized():
    for attack in ("<script>1</script>", "<img src=x onerror=alert(1)>", '<p style="background:url(//x)">x</p>', "<p>"):
        with pytest.raises(AssertionError):
            assert_harmless(attack)


def test_the_sanitizer_keeps_what_a_report_needs():
    kept = '<h2>T</h2><p>a &lt; b <span style="color:#d55e00;background-color:rgb(1, 2, 3)" title="x">x</span></p>'
    table = '<table><thead><tr><th colspan="2">n</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>'
    image = f'<img src="data:image/png;base64,{PNG}" alt="tree">'
    assert sanitize_html(kept + table + image) == kept + table + image
    assert sanitize_html("<style scoped>.a {}</style><div>x</div>") == "<div>x</div>"


def test_markdown_keeps_headings_tables_and_formulas():
    html = render_markdown("# One\n\n## Two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n$x_{i} y_{j}$ and **b**")
    assert re.search("<h1[^>]*>One<", html)
    assert re.search("<h2[^>]*>Two<", html)
    assert "<td>1</td>" in html
    assert "x_{i} y_{j}" in html
    assert "<strong>b</strong>" in html


def test_links_lead_to_headings_of_the_same_notebook():
    html = render_markdown("# The sweep\n\n[there](#The-sweep), [away](https://example.org/)")
    assert '<h1 id="part-1-The-sweep">' in html
    assert '<a href="#part-1-The-sweep">there</a>' in html
    assert "<a>away</a>" in html


def test_the_colours_of_token_text_survive_and_its_markup_stays_text():
    from kdlab.viz.text import Origin, _span

    token = _span(Origin(0, 2), "&lt;b onclick=&quot;x&quot;&gt;", "round 0: depth 2 <i>")
    html = render(v4.new_code_cell("", outputs=[output(text__html=f"<div><pre>{token}</pre></div>")]))
    assert f"background-color:{Origin(0, 2).fill}" in html
    reader = assert_harmless(html)
    assert '<b onclick="x">' in reader.text
    assert ("span", "title", "round 0: depth 2 <i>") in reader.attributes


def test_outputs_are_shown_once_and_code_and_widgets_are_not():
    widget = v4.new_output("display_data", data=WIDGET_VIEW)
    twin = v4.new_output("display_data", data=WIDGET_VIEW | {"image/png": PNG})
    table = output(text__html="<table><tr><td>7</td></tr></table>", text__plain="   0\n0  7")
    sound = output(audio__wav="AAAA")
    html = render(v4.new_code_cell("secret_code()", outputs=[widget, twin, table, sound]))
    assert "secret_code" not in html
    assert "IntSlider" not in html
    assert html.count("<img") == 1
    assert html.count("7") == 1 + PNG.count("7")
    for tag in ("no-report", "parameters", "injected-parameters"):
        assert render(v4.new_code_cell("", metadata={"tags": [tag]}, outputs=[table])) == ""


def test_of_a_progress_bar_the_last_state_is_shown():
    pieces = [v4.new_output("stream", name="stderr", text=text) for text in ("10%\r50%\r", "100%\ndone ")]
    red = v4.new_output("stream", name="stderr", text="\x1b[31mred\x1b[0m\n")
    reader = Reader(render(v4.new_code_cell("", outputs=[*pieces, red])))
    assert reader.text.split() == ["100%", "done", "red"]


def test_the_same_notebooks_give_the_same_bytes_and_are_not_written_twice(tmp_path):
    figure = v4.new_code_cell("plot()", outputs=[output(image__png=PNG)])
    notebook = finished(v4.new_markdown_cell("# Sweep"), figure, provenance={"gpu": None, "seed": 0})
    first = build_report([save(notebook, tmp_path)], tmp_path / "a.html", title="A & B")
    before = first.stat().st_mtime_ns
    build_report([tmp_path / "demo.ipynb"], tmp_path / "a.html", title="A & B")
    assert first.stat().st_mtime_ns == before
    second = build_report([tmp_path / "demo.ipynb"], tmp_path / "deep" / "er" / "b.html", title="A & B")
    assert second.read_bytes() == first.read_bytes()
    html = first.read_text()
    assert '<h1 id="part-1-Sweep">Sweep<' in html
    assert "<title>A &amp; B</title>" in html
    assert "<th>seed</th><td>0</td>" in html
    assert "<th>gpu</th><td></td>" in html
    assert not re.search(r"(src|href)=\"(?!data:|#)", html)
    notebook.cells[0].source = "# Other"
    build_report([save(notebook, tmp_path)], tmp_path / "a.html", title="A & B")
    assert "Other" in first.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "deep", "demo.ipynb"]


def test_rendering_leaves_the_notebook_as_it_is(tmp_path):
    notebook = finished(v4.new_code_cell("1", outputs=[v4.new_output("display_data", data=WIDGET_VIEW)]))
    before = nbformat.writes(notebook)
    render_notebook(notebook)
    assert nbformat.writes(notebook) == before


def test_a_report_of_many_figures_is_their_size_and_little_more(tmp_path):
    image = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(150_000)).decode()
    cells = [v4.new_code_cell("", outputs=[output(image__png=image)]) for _ in range(10)]
    path = build_report([save(finished(v4.new_markdown_cell("# Sweep"), *cells), tmp_path)], tmp_path / "x.html")
    assert path.read_text().count("<img") == 10
    assert path.stat().st_size < 10 * len(image) + 30_000 < 3_000_000


def test_unfinished_notebooks_are_refused(tmp_path):
    raw = v4.new_notebook(cells=[v4.new_code_cell("1")])
    pending = finished(v4.new_code_cell("1"))
    pending.cells[0].metadata["papermill"]["status"] = "pending"
    failed = finished(v4.new_code_cell("1", outputs=[v4.new_output("error", ename="E", evalue="v")]))
    stopped = finished(v4.new_code_cell("1"))
    stopped.metadata["papermill"] = {"exception": True}
    for notebook, problem in [
        (raw, "did not complete"), (pending, "status pending"), (failed, "E: v"), (finished(final=False), "final"),
        (stopped, "exception"),
    ]:  # fmt: skip
        assert problem in read_outcome(notebook).problem
        with pytest.raises(NotebookError, match=problem):
            build_report([save(notebook, tmp_path)], tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()
    with pytest.raises(ArgumentError, match="at least one"):
        build_report([], tmp_path / "x.html")


def test_figures_keep_the_names_that_they_were_shown_with(tmp_path):
    picture = v4.new_output("display_data", data={"image/png": PNG}, metadata={FIGURE_KEY: "../../tree.png"})
    named = v4.new_code_cell("", outputs=[picture])
    other = v4.new_code_cell("", outputs=[output(image__png=PNG)])
    path = save(finished(named, other), tmp_path, "10_sweep")
    written = export_figures([path], tmp_path / "figures")
    assert [file.name for file in written] == ["tree.png", "10_sweep-1.png"]
    assert written[0].read_bytes() == base64.b64decode(PNG)
    assert sorted(tmp_path.rglob("*.png")) == sorted(written)
    with pytest.raises(ArgumentError, match="each figure name once"):
        export_figures([path, path], tmp_path / "figures")


def test_records_are_json_and_say_so(capsys):
    from kdlab.report import show_result

    with pytest.raises(ArgumentError, match="a dictionary"):
        show_result([1])
    with pytest.raises(ValueError, match="record\\['x'\\]"):
        show_result({"x": {1, 2}})
    show_result({"x": (1, float("nan")), "final": True})
    assert "result record: x, final" in capsys.readouterr().out


def test_a_notebook_of_an_older_format_is_read(tmp_path):
    (tmp_path / "old.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 0}')
    assert read_notebook(tmp_path / "old.ipynb").cells == []
