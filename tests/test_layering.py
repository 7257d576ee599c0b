"""Imports go one way through the rooms, and importing kdlab does no work."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kdlab

PACKAGE = Path(kdlab.__file__).parent
# From left to right: a module imports from its own room and from rooms before it; bench never needs profiling, which
# watches what bench makes.
ORDER = ["config", "kernels", "model", "tree", "decode", "study", "mini", "bench", "profiling", "viz", "report", "cli"]
FORBIDDEN = {("tree", "model")}
HEAVY = ("transformers", "papermill", "matplotlib", "IPython", "pandas", "torch.cuda.nvtx")


def room_of(module: str) -> str | None:
    """Name the room of a dotted module; modules straight under `kdlab` are the config room, `kdlab` itself is none."""
    parts = module.split(".")
    if len(parts) == 1:
        return None
    return parts[1] if (PACKAGE / parts[1]).is_dir() else "config"


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["kdlab", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(path: Path, module: str) -> set[str]:
    """Every kdlab module that the file names in an import, at any depth of the code."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level + (path.name == "__init__.py") or None]
                base = ".".join([*parents, base] if base else parents)
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in names if name in MODULES or name == "kdlab"}


def faults(module: str, path: Path) -> list[str]:
    room = room_of(module)
    found = []
    for name in sorted(imported(path, module)):
        other = room_of(name)
        if room is None or other is None or other == room:
            continue
        if ORDER.index(other) > ORDER.index(room) or (room, other) in FORBIDDEN:
            found.append(f"{module} ({room}) imports {name} ({other})")
    return found


def test_every_room_has_its_place():
    assert {room_of(module) for module in MODULES} - {None} <= set(ORDER)


def test_imports_go_left():
    assert [fault for module, path in MODULES.items() for fault in faults(module, path)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kdlab.tree.bad", "from kdlab.model import cache"),
        ("kdlab.tree.bad", "def f():\n    import kdlab.decode"),
        ("kdlab.checks", "from kdlab.report import run_notebook"),
        ("kdlab.model.bad", "from ..decode import engine"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, module, source):
    path = tmp_path / "bad.py"
    path.write_text(source)
    assert faults(module, path)


def test_only_config_reads_the_environment():
    found = []
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if environment_read(node) and module != "kdlab.config":
                found.append(f"{module}:{node.lineno}")
    assert found == []


def environment_read(node: ast.AST) -> bool:
    """`os.environ[...]` as a value, `os.environ.get(...)`, `os.getenv(...)`, ...; setting a variable is none."""
    if isinstance(node, ast.Attribute) and node.attr in ("getenv", "environb"):
        return True
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
        return isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os.environ":
        return True
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(alias.name in ("environ", "getenv") for alias in node.names)
    return isinstance(node, ast.Call) and any(ast.unparse(argument) == "os.environ" for argument in node.args)


@pytest.mark.parametrize("source", ["os.environ['A']", "os.getenv('A')", "os.environ.get('A')", "dict(os.environ)"])
def test_an_environment_read_is_found(source):
    assert any(environment_read(node) for node in ast.walk(ast.parse(source)))


CHECK_IMPORT = """
import os, sys
import kdlab
heavy = [name for name in {heavy!r} if name in sys.modules]
assert not heavy, heavy
loaded = {{name for name in sys.modules if name.startswith("kdlab.")}}
assert loaded <= {{"kdlab.source", "kdlab.paths", "kdlab.errors"}}, f"a room was loaded: {{loaded}}"
import kdlab.checks, kdlab.config, kdlab.cli, kdlab.kernels, kdlab.model, kdlab.tree, kdlab.decode, kdlab.study
import kdlab.report
heavy = [name for name in ("transformers", "papermill", "matplotlib", "IPython") if name in sys.modules]
assert not heavy, heavy
import torch
assert not torch.cuda.is_initialized()
assert os.listdir() == [], os.listdir()
"""


def test_importing_does_no_work(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n" + CHECK_IMPORT.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == ""
