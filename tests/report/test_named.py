"""Reports of named runs: found by name, refused where anything did not finish, all figures there in every format."""

import base64
import json
from pathlib import Path

import nbformat.v4 as v4
import pytest
from matplotlib.figure import Figure

from kdlab.cli import main
from kdlab.errors import ArgumentError, KdlabError, NotebookError
from kdlab.report import check_complete, find_run, print_pdf
from kdlab.report.contents import render_contents
from kdlab.report.done_marker import write_marker
from kdlab.report.figures import FIGURE_KEY, check_figures
from kdlab.report.pdf import find_browser
from kdlab.report.provenance_table import render_provenance
from kdlab.report.vectors import VECTOR_MIME, pack_vectors, unpack_vectors
from kdlab.viz import png_bytes
from tests.report.test_report import finished, save

SCRIPT = "</text>--><script>alert(1)</script>"


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setattr("kdlab.report.named.RUNS", tmp_path / "runs")
    monkeypatch.setattr("kdlab.report.named.GRIDS", tmp_path / "runs" / "grids")
    monkeypatch.chdir(tmp_path)


def drawing(title=SCRIPT):
    figure = Figure(figsize=(2, 1))
    figure.add_subplot().set_title(title, parse_math=False)
    return figure


def figure_cell(name="fig.png", title=SCRIPT):
    figure = drawing(title)
    data = {"image/png": base64.b64encode(png_bytes(figure, 40)).decode(), VECTOR_MIME: pack_vectors(figure)}
    return v4.new_code_cell("", outputs=[v4.new_output("display_data", data=data, metadata={FIGURE_KEY: name})])


def point(folder, *cells, name="demo", parameters=None, **record):
    folder.mkdir(parents=True, exist_ok=True)
    notebook = finished(v4.new_markdown_cell("# Sweep\n\n## Part <b>two</b>"), *cells, **record)
    notebook.metadata["papermill"] = {"parameters": (parameters or {}) | {"figures": "elsewhere"}}
    path = save(notebook, folder, name)
    write_marker(path, path, "inputs", 1.0)
    return path


def grid(root, **points):
    for name, parameters in points.items():
        point(root / name, figure_cell(title=name), parameters=parameters)
    (root / "grid.json").write_text(json.dumps({"points": points}))


def test_a_named_run_gives_html_figures_in_three_formats_and_a_pdf(tmp_path, capsys):
    point(tmp_path / "runs" / "night1", figure_cell("a.png"), figure_cell("b.png", "second"))
    assert main(["report", "night1", "--title", f"Night {SCRIPT}"]) == 0
    out, error = capsys.readouterr()
    folder = tmp_path / "reports" / "night1"
    html = (folder / "report.html").read_text()
    assert "1 notebook, 2 figures." in html
    assert html.count("<img") == 2
    assert '<a href="#part-1-Part-two">Part two</a>' in html
    assert "<script" not in html
    names = sorted(path.name for path in (folder / "figures").iterdir())
    assert names == ["a.pdf", "a.png", "a.svg", "b.pdf", "b.png", "b.svg"]
    assert "figures: 2 in" in out
    if find_browser():
        assert (folder / "report.pdf").read_bytes().startswith(b"%PDF-")
    else:
        assert "apt-get install chromium" in error


def test_each_table_of_a_grid_says_whose_it_is(tmp_path, capsys):
    root = tmp_path / "runs" / "grids" / "night2"
    grid(root, b7={}, b15={})
    for name, rounds in (("b7", 5), ("b15", 4)):
        point(root / name, times=[{"rounds": rounds}])
    assert main(["report", "night2", "--no-pdf"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.endswith("times:")] == [
        f"{root / name / 'demo.ipynb'}: times:" for name in ("b7", "b15")
    ]


def test_a_grid_is_its_planned_points_in_their_order(tmp_path):
    root = tmp_path / "runs" / "grids" / "night2"
    grid(root, b7={"budget": 7}, a15={"budget": 15})
    point(root / "old", figure_cell())  # of an earlier call
    run = find_run("night2")
    assert [point.name for point in run.points] == ["b7", "a15"]
    assert run.points[1].parameters == {"demo": {"budget": 15}}
    assert main(["report", "night2", "--no-pdf", "--json"]) == 0
    report = tmp_path / "reports" / "night2"
    assert sorted(path.name for path in (report / "figures" / "b7").iterdir()) == ["fig.pdf", "fig.png", "fig.svg"]
    html = (report / "report.html").read_text()
    assert html.index("b7/demo") < html.index("a15/demo")
    assert "old/demo" not in html
    assert "<th>parameters</th><td>{&quot;budget&quot;: 7}</td><td>{&quot;budget&quot;: 15}</td>" in html


def test_what_did_not_complete_is_refused_and_nothing_is_written(tmp_path, capsys):
    root = tmp_path / "runs" / "grids" / "night3"
    grid(root, first={}, second={}, third={}, fourth={})
    check_complete(find_run("night3"))
    (root / "first" / "demo.ipynb").write_text((root / "first" / "demo.ipynb").read_text() + " ")
    (root / "second" / "demo.done.json").unlink()
    (root / "third" / "demo.ipynb").rename(root / "third" / "demo.partial.ipynb")
    (root / "fourth" / "demo.ipynb").unlink()
    problems = find_run("night3").unfinished
    assert "changed after its run" in problems["first/demo.ipynb"]
    assert "no marker" in problems["second/demo.ipynb"]
    assert "ended at its last cell" in problems["third/demo.ipynb"]
    assert problems["fourth"] == "it did not start"
    with pytest.raises(NotebookError, match=r"did not complete: first/demo\.ipynb"):
        check_complete(find_run("night3"))
    assert main(["report", "night3"]) == 3
    error = capsys.readouterr().err
    assert "kdlab grid" in error
    assert "earlier report" not in error
    assert not (tmp_path / "reports").exists()
    (tmp_path / "old.html").write_text("old")
    assert main(["report", "night3", "-o", "old.html"]) == 3
    assert "old.html is an earlier report" in capsys.readouterr().err


def test_names_that_are_no_run_are_said_to_be_none(tmp_path, capsys):
    point(tmp_path / "runs" / "one")
    for name in ("runs/twice", "runs/grids/twice"):
        point(tmp_path / name)
    (tmp_path / "runs" / "empty").mkdir()
    expected = {"absent": r"\(empty, one, twice\)", "empty": "holds none", "no/where": "a named run", "": "a named run",
                "grids": "a named run", "twice": "one run; give the folder"}  # fmt: skip
    for name, said in expected.items():
        with pytest.raises(ArgumentError, match=said):
            find_run(name)
    assert find_run(str(tmp_path / "runs" / "one")).name == "one"
    assert main(["report"]) == 2
    assert main(["report", "one", "--compare", "a", "b"]) == 2
    assert main(["report", "one", "--about", "gpu"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_lost_figure_is_found():
    cell = figure_cell()
    record = {"figures": ["fig.png"]}
    image = cell.outputs[0].data["image/png"]
    html = f'<img src="data:image/png;base64,{image}">'
    assert check_figures("demo", [cell], record, html) == 1
    assert check_figures("demo", [], {"figures": 3}, "") == 0
    with pytest.raises(NotebookError, match="2 of its 2 figures did not reach"):
        check_figures("demo", [cell, cell], record, html.replace(image[:9], "AAAAAAAAA"))
    with pytest.raises(NotebookError, match="1 of its 2 figures"):
        check_figures("demo", [cell, cell], record, html)
    with pytest.raises(NotebookError, match=r"does not show: other\.png"):
        check_figures("demo", [cell], {"figures": ["fig.png", "other.png"]}, html)


def test_vector_forms_are_equal_each_time_and_hold_text_as_text():
    packed = pack_vectors(drawing())
    assert pack_vectors(drawing()) == packed
    files = unpack_vectors(packed)
    assert b"<script" not in files["svg"]
    assert b"&lt;script&gt;" in files["svg"]
    assert files["pdf"].startswith(b"%PDF-")


@pytest.mark.parametrize(
    "inside",
    [
        "<script>alert(1)</script>", '<g onclick="alert(1)"/>', '<a href="https://evil.example">x</a>',
        "<foreignObject/>", '<image href="https://evil.example/x.png"/>', "<style>@import '//evil.example';</style>",
        '<path style="fill: url(//evil.example)"/>', "<unclosed>",
    ],
)  # fmt: skip
def test_an_svg_that_is_more_than_a_drawing_is_refused(inside):
    import zlib

    def packed(svg):
        return {"svg": base64.b64encode(zlib.compress(svg.encode())).decode()}

    frame = '<svg xmlns="http://www.w3.org/2000/svg">{}</svg>'
    assert unpack_vectors(packed(frame.format('<path style="clip-path: url(#p)"/>')))
    with pytest.raises(ArgumentError, match="figure"):
        unpack_vectors(packed(frame.format(inside)))
    for broken in ("?", base64.b64encode(b"no zlib").decode(), packed(frame)["svg"][:-8]):
        with pytest.raises(ArgumentError, match="figure"):
            unpack_vectors({"svg": broken})


def test_contents_of_many_parts_are_folded():
    html = '<h1 id="part-1-A">A &lt;b&gt; <em>x</em></h1><h3 id="part-1-c">c</h3>'
    one = render_contents([("part-1", "<name>", html)])
    assert '<a href="#part-1">&lt;name&gt;</a><ul><li><a href="#part-1-A">A &lt;b&gt; x</a></li></ul>' in one
    assert "<details>" in render_contents([(f"part-{i}", "n", html) for i in range(9)])


def test_provenance_says_once_what_is_the_same():
    same, other = {"provenance": {"gpu": "H<2>", "seed": 0}}, {"provenance": {"gpu": "H<2>", "seed": 1}}
    html = render_provenance([("a", same, {}), ("a", other, {})])
    assert html.count("H&lt;2&gt;") == 1
    assert "<th>seed</th><td>0</td><td>1</td>" in html


def fake_browser(folder: Path, script: str) -> str:
    path = folder / "browser"
    find = 'for word; do case "$word" in --print-to-pdf=*) out="${word#*=}";; esac; done'
    path.write_text(f"#!/bin/sh\n{find}\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_browser_that_does_not_print_is_named(tmp_path, monkeypatch):
    html = tmp_path / "x.html"
    html.write_text('<img alt="a" src="data:image/png;base64,AA"><img alt="b" src="data:image/png;base64,AB">')
    page, picture = "%PDF-1.4 << /Type /Page >>", "<< /Subtype /Image >>"
    whole = fake_browser(tmp_path, f"echo '{page} {picture} {picture} %%EOF' > $out")
    assert print_pdf(html, tmp_path / "x.pdf", browser=whole) == 1
    (tmp_path / "x.pdf").unlink()
    for script, said in {
        "echo no display >&2; exit 1": "no display",
        f"echo '{page} cut off' > $out": "printed no PDF",
        f"echo '{page} {picture} %%EOF' > $out": "printed 1 of the 2 figures",
    }.items():
        with pytest.raises(KdlabError, match=said):
            print_pdf(html, tmp_path / "x.pdf", browser=fake_browser(tmp_path, script))
    monkeypatch.setattr("kdlab.report.pdf.TIMEOUT_S", 0.2)
    with pytest.raises(KdlabError, match="did not end"):
        print_pdf(html, tmp_path / "x.pdf", browser=fake_browser(tmp_path, "exec sleep 5"))
    assert not (tmp_path / "x.pdf").exists()


def test_without_a_browser_the_next_step_is_said(tmp_path, monkeypatch, capsys):
    point(tmp_path / "runs" / "night1")
    monkeypatch.setattr("kdlab.report.pdf.find_browser", lambda: None)
    assert main(["report", "night1"]) == 0
    error = capsys.readouterr().err
    assert "apt-get install chromium" in error
    assert "report.html" in error
    assert not (tmp_path / "reports" / "night1" / "report.pdf").exists()
    assert main(["report", "night1", "--pdf"]) == 1
