"""The pages: built strictly, every public name in the reference, numbers from the recorded file, code that runs."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from kdlab.bench import read_rows
from kdlab.cli.parser import make_parser
from kdlab.kernels.jit import PORTABLE, Build, compile_all
from kdlab.kernels.jit import build as jit_build
from kdlab.paths import CSRC
from kdlab.report import kernel_page

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted(ROOT.glob("docs/*.md"))
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *DOCS]}
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "data/README.md")
RUN = ("README.md", "docs/ideas-round.md", "docs/ideas-cost.md", "docs/kernels.md", "docs/extend.md", "docs/runs.md")
"""Pages whose Python runs here; tests/study/test_traces.py reads docs/traces.md."""
ROOMS = ("kdlab", "kdlab.tree", "kdlab.decode", "kdlab.study", "kdlab.bench", "kdlab.bench.kernels", "kdlab.profiling",
         "kdlab.viz", "kdlab.report")  # fmt: skip
PLANNED = {
    "csrc/tree_mass.cu", "kdlab/kernels/tree_mass.py", "tests/kernels/test_tree_mass.py", "notebooks/60_expected.ipynb",
}  # fmt: skip
"""What the recipes would add."""


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def build(config, site):
    words = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_reference_has_every_public_name(site):
    anchors = set()
    for html in (site / "reference").glob("*.html"):
        anchors |= set(re.findall(r'id="(kdlab[\w.]*)"', html.read_text(encoding="utf-8")))
    missing = []
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            places = {f"{room}.{name}", f"{room}.{name}.{name}"}  # the second where a module has its function's name
            called = callable(getattr(module, name))  # constants stand beside what takes them
            if called and not places & anchors:
                missing.append(f"{room}.{name}")
    assert missing == [], "a name that its module has too needs a line of its own in docs/reference"


@pytest.mark.parametrize("text", ["[no](none.md)\n", "[no](#none)\n"])
def test_a_broken_link_fails_the_build(text, tmp_path):
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert set(settings["plugins"][1]) == {"mkdocstrings"}
    settings |= {"plugins": [], "docs_dir": str(tmp_path / "docs"), "theme": {"name": "mkdocs"}}
    del settings["nav"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (tmp_path / "docs" / "index.md").write_text(f"# A\n\n{text}", encoding="utf-8")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    assert "WARNING" in done.stderr


def broken_links(folder, text):
    """Relative links of a Markdown text that lead nowhere, seen from its folder."""
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text)
    found = []
    for path, anchor in links:
        content = text if not path else (folder / path).read_text("utf-8") if path.endswith(".md") else ""
        headings = {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in
                    re.findall(r"^#+ (.*)$", content, re.MULTILINE)}  # fmt: skip
        if not (folder / path).exists() or (anchor and anchor not in headings):
            found.append(f"{path}#{anchor}")
    return found


@pytest.mark.parametrize("name", OUTSIDE)
def test_links_of_pages_outside_docs_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert broken_links((ROOT / name).parent, text) == []
    assert broken_links(ROOT, "[a](nowhere.txt) [b](#none)\n# Some\n[c](#some)") == ["nowhere.txt#", "#none"]


def test_kernel_times_are_those_of_the_recorded_file(tmp_path, capsys):
    rows = read_rows(kernel_page.ROWS)
    for path in kernel_page.PAGES:
        text = path.read_text(encoding="utf-8")
        assert text == kernel_page.fill(text, rows), "python -m kdlab.report.kernel_page writes them anew"
        assert "<!-- kernels: " in text
        assert len(re.findall("<!-- (kernels|cost): ", text)) == text.count("<!-- end -->")
    typed = text.replace(" to ", " or ", 1)
    assert kernel_page.fill(typed, rows) != typed
    copy = tmp_path / "page.md"
    copy.write_text(typed, encoding="utf-8")
    assert kernel_page.main([str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == text
    assert "written" in capsys.readouterr().out
    with pytest.raises(ValueError, match="place"):
        kernel_page.fill("<!-- kernels: none -->\n<!-- end -->", rows)


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A folder that looks like the clone to a reader of the pages."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", RUN)
def test_python_of_the_pages_runs(name, reader):
    namespace = {"__name__": "page"}
    found = blocks(TEXTS[name], "python")
    assert found
    for number, code in enumerate(found, 1):
        exec(compile(code, f"{name}, block {number}", "exec"), namespace)


def test_all_python_is_run_or_at_least_compiles():
    assert {name for name, text in TEXTS.items() if blocks(text, "python")} <= {*RUN, "docs/traces.md"}
    for name, text in TEXTS.items():
        for code in blocks(text, "py"):
            compile(code, name, "exec")


def test_the_kernel_of_the_recipe_compiles_for_every_architecture(tmp_path, monkeypatch):
    (source,) = blocks(TEXTS["docs/extend.md"], "cuda")
    (tmp_path / "tree_mass.cu").write_text(source, encoding="utf-8")
    for header in CSRC.glob("*.cuh"):
        shutil.copy(header, tmp_path)
    monkeypatch.setattr(jit_build, "CSRC", tmp_path)
    built = compile_all([(Build("tree_mass.cu"), arch) for arch in PORTABLE], workers=2)
    for job, cubin in built.items():
        assert "tree_mass" in getattr(cubin, "kernels", {}), f"{job}: {cubin}"


@pytest.mark.gpu
def test_the_kernel_of_the_recipe_agrees_with_its_reference(tmp_path, monkeypatch):
    test_the_kernel_of_the_recipe_compiles_for_every_architecture(tmp_path, monkeypatch)
    namespace = {"__name__": "recipe"}
    (code,) = [code for code in blocks(TEXTS["docs/extend.md"], "python") if "BUILDS" in code]
    exec(compile(code.replace('cuda_op("tree_mass")', 'cuda_op("tree_mass_gpu")'), "recipe", "exec"), namespace)
    logp, nodes = -torch.rand(4, 129, device="cuda"), torch.tensor([1, 2, 33, 129], device="cuda", dtype=torch.int32)
    found = namespace["tree_mass"](logp, nodes, impl="cuda")
    torch.testing.assert_close(found, namespace["tree_mass"](logp, nodes, impl="reference"))


def wrong_commands(text):
    """Lines of bash that no reader could run: unknown verbs, options, make targets or modules."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    wrong = []
    for line in "\n".join(blocks(text, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        no_target = words[:1] == ["make"] and words[1] not in targets
        no_module = words[:2] == ["python", "-m"] and importlib.util.find_spec(words[2]) is None
        if no_target or no_module or (words[:1] == ["kdlab"] and not parses(words[1:])):
            wrong.append(line)
    return wrong


def parses(words):
    try:
        make_parser().parse_args(words)
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize("name", [*OUTSIDE, *(name for name in TEXTS if name != "README.md")])
def test_commands_of_the_pages_exist(name):
    assert wrong_commands((ROOT / name).read_text(encoding="utf-8")) == []


def test_a_wrong_command_is_found(capsys):
    lines = ["kdlab none", "kdlab sweep f --width 3", "make none", "python -m kdlab.none", "kdlab sweep f  # fine"]
    assert wrong_commands("```bash\n" + "\n".join(lines) + "\n```") == lines[:4]
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_a_page_names_are_there(name):
    named = set(re.findall(r"`((?:kdlab|tests|csrc|notebooks|data)/[\w./-]+\.\w+|docs/[\w./-]+)`", TEXTS[name]))
    assert [path for path in sorted(named - PLANNED) if not (ROOT / path).exists()] == []


def test_every_picture_is_made_by_a_notebook_and_says_by_which():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    kept, cost = (re.search(rf"^{name} := (.*)$", makefile, re.MULTILINE)[1].split() for name in ("PICTURES", "COST"))
    there = {path.stem for path in (ROOT / "docs/pictures").iterdir()}
    assert set(kept) <= there <= {*kept, *cost}, "one of COST needs recorded rounds"
    shown = set()
    for name, text in TEXTS.items():
        pattern = r"^!\[[^]]+\]\((?:docs/)?pictures/(\w+)\.png\)\n\n(.*?)\n\n"
        for picture, caption in re.findall(pattern, text, re.MULTILINE | re.DOTALL):
            shown.add(picture)
            (notebook,) = ROOT.glob(f"notebooks/{picture[:2]}_*.ipynb")
            assert f"{picture}.png" in notebook.read_text(encoding="utf-8")
            assert name == "README.md" or f"kdlab run notebooks/{notebook.name}" in caption.replace("\n", " ")
    assert shown == there


def test_the_notebooks_and_the_slider_that_the_readme_names_are_there():
    text = (ROOT / "notebooks" / "00_start_here.ipynb").read_text(encoding="utf-8")
    assert "## Every round" in text
    assert "RoundViewer(" in text
    named = re.findall(r"^\| `(\d\d_\w+)` \|", TEXTS["README.md"], re.MULTILINE)
    assert named == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")), "the table of the README"
    assert 'description="Round"' in (ROOT / "kdlab" / "viz" / "widgets" / "round_viewer.py").read_text(encoding="utf-8")


def test_the_readme_is_short_and_its_first_screen_says_what_it_is():
    lines = TEXTS["README.md"].splitlines()
    assert len(lines) <= 150
    first = "\n".join(lines[:28])
    for words in ("DDTree", "make lab", "make test", "![", "**What runs today**", "**Not yet**"):
        assert words in first, words


def test_a_docstring_line_of_several_names_becomes_one_each():
    spec = importlib.util.spec_from_file_location("docstring_names", ROOT / ".ci" / "docstring_names.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "One.\n\nArgs:\n    a, b: both\n        of them\n    c: alone\n"
    split = "    a: both\n        of them\n    b: both\n        of them\n    c: alone\n"
    assert module.each_name(text) == f"One.\n\nArgs:\n{split}"
