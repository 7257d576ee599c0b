"""The pages: built strictly with every public name in the reference, numbers from the recorded files, code that runs."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kdlab", "kdlab.tree", "kdlab.decode", "kdlab.study", "kdlab.bench", "kdlab.bench.kernels", "kdlab.profiling",
         "kdlab.viz", "kdlab.report")  # fmt: skip


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
    for page in (site / "reference").glob("*.html"):
        anchors |= set(re.findall(r'id="(kdlab[\w.]*)"', page.read_text(encoding="utf-8")))
    missing = []
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            places = {f"{room}.{name}", f"{room}.{name}.{name}"}  # the second where a module has its function's name
            if name != "__version__" and not isinstance(getattr(module, name), ModuleType) and not places & anchors:
                missing.append(f"{room}.{name}")
    assert missing == []


def test_a_broken_link_fails_the_build(tmp_path):
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert set(settings["plugins"][1]) == {"mkdocstrings"}
    settings |= {"plugins": [], "docs_dir": str(tmp_path / "docs")}
    settings.pop("nav", None)
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    for text, good in [("# A\n\n[up](#a)\n", True), ("[no](none.md)\n", False), ("[no](#none)\n", False)]:
        (tmp_path / "docs" / "index.md").write_text(text, encoding="utf-8")
        assert (build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode == 0) == good, text
