"""The house style that a program can check: linters, sizes, notebooks without outputs, nobody's machine named."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from kdlab.report import declared_parameters

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kdlab", "tests", "notebooks", "csrc", "docs", "data", ".ci")
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "environment.yml")
TEXT = {".py", ".md", ".ipynb", ".toml", ".yml", ".cu", ".cuh", ".css", ".json", ".jsonl", ".lock", ""}
PYTHON = [path for folder in ("kdlab", "tests", ".ci") for path in sorted((ROOT / folder).rglob("*.py"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FILE_LINES, FUNCTION_LINES, CELL_LINES, CUDA_LINES = 300, 50, 15, 500
# Written in pieces, so that this file does not hold them itself.
FOLDERS_OF_ONE_MACHINE = "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me", "Use" + "rs"])
REGISTRIES = "|".join([r"py" + r"pi\.org", "python" + "hosted", r"registry\.npm" + "js", r"download\.py" + "torch"])
FORBIDDEN = {
    "a path of somebody's machine": rf"(?<![\w./-])/({FOLDERS_OF_ONE_MACHINE})/\w",
    "a package registry": REGISTRIES,
    "unfinished work": r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b|NotImpl" + "ementedError",
}


def texts():
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
                yield path
    yield from (ROOT / name for name in FILES if (ROOT / name).exists())


def tool(*arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_is_clean():
    tool("ruff", "check", "--no-cache", ".")


def test_mypy_is_clean(tmp_path):
    tool("mypy", "--cache-dir", str(tmp_path))


def test_nothing_names_a_machine_or_is_unfinished():
    found = []
    for path in texts():
        text = path.read_text(encoding="utf-8")
        for what, pattern in FORBIDDEN.items():
            found += [f"{path.relative_to(ROOT)}: {what}: {match[0]!r}" for match in re.finditer(pattern, text)]
    assert found == []


def test_files_and_functions_are_short():
    found = []
    for path in PYTHON:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > FILE_LINES:
            found.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and own_lines(node) > FUNCTION_LINES:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {own_lines(node)} lines")
    assert found == []


def test_cuda_sources_are_short_and_begin_with_what_they_do():
    found = []
    for path in sorted((ROOT / "csrc").iterdir()):
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > CUDA_LINES or max(map(len, lines)) > 120 or not lines[0].startswith(f"// csrc/{path.name}: "):
            found.append(f"{path.name}: {len(lines)} lines, begins {lines[0]!r:.60}")
    assert found == []


def own_lines(node):
    """Lines of a function without its docstring."""
    length = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        length -= first.end_lineno - first.lineno + 1
    return length


def test_public_functions_have_docstrings():
    found = []
    for path in sorted((ROOT / "kdlab").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not ast.get_docstring(tree):
            found.append(f"{path.relative_to(ROOT)}: the module")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_" and not ast.get_docstring(node):
                found.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert found == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_hold_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert declared_parameters(notebook, path.name)
    for i, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code":
            assert not cell.outputs, f"cell {i} holds outputs"
            assert cell.execution_count is None
            assert len(cell.source.splitlines()) <= CELL_LINES, f"cell {i} has {len(cell.source.splitlines())} lines"
    assert "widgets" not in notebook.metadata
    assert "papermill" not in notebook.metadata


def test_nbstripout_agrees(tmp_path):
    if not NOTEBOOKS:
        pytest.skip("there are no notebooks")
    names = [str(shutil.copy(path, tmp_path)) for path in NOTEBOOKS]
    tool("nbstripout", "--verify", "--keep-id", *names)
