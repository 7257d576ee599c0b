"""pyproject.toml, the lock file, environment.yml and the lists of shipped data agree with each other."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import kdlab
from kdlab.cli.doctor import OPTIONAL, check_data
from kdlab.paths import CSRC

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED_EXTRAS = ("lab", "report", "cluster", "test", "docs", "dev")
CONDA_EXTRAS = ("gpu", "lab", "report", "cluster", "test", "docs")
# The few packages whose conda-forge names differ from PyPI's.
CONDA_NAMES = {
    "torch": "pytorch-gpu",
    "matplotlib": "matplotlib-base",
    "nvidia-cuda-nvrtc": "cuda-nvrtc",
    "nvidia-cuda-runtime": "cuda-cudart-dev",
    "nvidia-cuda-nvdisasm": "cuda-nvdisasm",
}
# What compiles kernels and reads their machine code without a GPU. The versions of compiler and headers are those that
# torch's own CUDA build asks for, so that the lock can be installed beside either build of torch.
COMPILER = {
    "cuda-bindings": "13.0.3",
    "cuda-pathfinder": "1.9.1",
    "nvidia-cuda-nvdisasm": "13.5.37",
    "nvidia-cuda-nvrtc": "13.0.88",
    "nvidia-cuda-runtime": "13.0.96",
}


def requirements(*extras):
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    return {canonicalize_name(Requirement(text).name): Requirement(text).specifier for text in texts}


def locked():
    lines = (ROOT / "requirements-cpu.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def conda():
    found, pip = {}, {}
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    for entry in environment["dependencies"]:
        if isinstance(entry, dict):
            pip = {canonicalize_name(Requirement(x).name): x for x in entry["pip"] if not x.startswith("-")}
        else:
            name, _, specifier = entry.partition(" ")
            found[name] = specifier
    return environment["channels"], found, pip


def test_the_lock_satisfies_pyproject():
    versions = {canonicalize_name(name): version for name, version in locked().items()}
    wrong = [
        f"{name}: {versions.get(name)} is not {specifier}"
        for name, specifier in requirements(*LOCKED_EXTRAS).items()
        if name not in versions or Version(versions[name]) not in specifier
    ]
    assert wrong == []


def test_the_lock_is_a_plain_cpu_list():
    pins = locked()
    assert pins["torch"] == "2.13.0"
    assert list(pins) == sorted(pins, key=lambda name: (name + "==").lower())
    for name, version in pins.items():
        assert re.fullmatch(r"[\w.-]+", name)
        assert re.fullmatch(r"[\w.]+", version), f"{name}: {version}"
    assert {name: version for name, version in pins.items() if re.match(r"nvidia|cuda|triton", name)} == COMPILER


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="this is not the environment that the lock made")
def test_the_environment_is_what_the_lock_says():
    names = locked()
    code = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    here = {canonicalize_name(name): Version(version).public for name, version in (x.split("==") for x in lines)}
    assert {name: here.get(canonicalize_name(name)) for name in names} == names


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="this is not the environment that the lock made")
def test_a_folder_of_that_name_does_not_hide_the_package(tmp_path):
    (tmp_path / "kdlab").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([sys.executable, "-c", "import kdlab; kdlab.load_pair"], cwd=tmp_path, env=environment)
    assert run.returncode == 0


def test_an_activated_environment_is_not_what_the_next_one_is_made_from(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    assert shutil.which("python3", path=environment["PATH"]) == str(tmp_path / "bin" / "python3")
    command = ["sh", ROOT / ".ci/find-python"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert len(found.splitlines()) == 1
    assert not Path(found.strip()).is_relative_to(tmp_path)


def test_environment_yml_is_in_step():
    channels, found, pip = conda()
    assert channels == ["conda-forge", "nodefaults"]
    wanted = requirements(*CONDA_EXTRAS)
    wrong = []
    for name, specifier in wanted.items():
        got = found.get(CONDA_NAMES.get(name, name))
        if got is None and name in pip:
            got = str(Requirement(pip[name]).specifier)
        if got is None or set(got.split(",")) != set(str(specifier).split(",")):
            wrong.append(f"{name}: {got} is not {specifier}")
    assert wrong == []
    known = {CONDA_NAMES.get(name, name) for name in wanted} | {"python", "cuda-version", "pip"}
    assert set(found) - known == set()
    assert not [name for name in pip if name.startswith(("nvidia", "torch", "cuda"))]
    assert set(f">={PROJECT['requires-python'].removeprefix('>=')}".split(",")) <= set(found["python"].split(","))


def test_every_extra_is_used():
    """An extra serves code or tests that are there: each of its packages is imported or run somewhere."""
    optional = {name for extra in PROJECT["optional-dependencies"] for name in requirements(extra)}
    optional -= requirements().keys() | {"packaging"}  # this file imports them
    modules = {
        "nvidia-ml-py": "pynvml",
        "pytest-xdist": "-n $(JOBS)",
        "cuda-core": "from cuda.core import",
        "cuda-bindings": "from cuda.bindings import",
        "nvidia-cuda-nvrtc": 'load_nvidia_dynamic_lib("nvrtc")',
        "nvidia-cuda-runtime": 'find_nvidia_header_directory("cudart")',
        "nvidia-cuda-nvdisasm": '"nvdisasm"',
        "sgl-flash-mla": "flash_mla",
        "mkdocs-material": "-m mkdocs",
        "mkdocstrings-python": '"mkdocstrings"',
    }
    paths = [*ROOT.glob("kdlab/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "Makefile"]
    paths.remove(Path(__file__))
    text = "\n".join(path.read_text() for path in paths)
    assert [name for name in sorted(optional) if modules.get(name, name.replace("-", "_")) not in text] == []
    assert set(OPTIONAL) <= optional


def test_every_room_and_the_cuda_sources_are_packed():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "kdlab").rglob("*.py")}
    assert setuptools["packages"] == sorted({".".join(folder.parts) for folder in folders} | {"kdlab.csrc"})
    assert setuptools["package-dir"] == {"kdlab.csrc": "csrc"}
    suffixes = {path.suffix for path in (ROOT / "csrc").iterdir()}
    assert suffixes <= {pattern.removeprefix("*") for pattern in setuptools["package-data"]["kdlab.csrc"]}


def test_a_wheel_brings_the_cuda_sources(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("kdlab", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    done = subprocess.run([*pip, "install", *options, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    code = "import kdlab.paths as p; print(p.PACKAGE, *sorted(x.name for x in p.CSRC.iterdir()))"
    words, environment = [sys.executable, "-P", "-c", code], {"PYTHONPATH": str(site)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    package, *names = done.stdout.split()
    assert Path(package) == site / "kdlab"
    assert names == sorted(path.name for path in (ROOT / "csrc").iterdir())
    assert CSRC == ROOT / "csrc"


def test_the_package_says_one_version():
    assert PROJECT["version"] == kdlab.__version__
    assert f"## {kdlab.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_every_shipped_file_is_listed_with_size_and_hash():
    text = (ROOT / "data" / "README.md").read_text()
    missing = []
    for path in sorted((ROOT / "data").rglob("*")):
        if path.is_file() and path.name != "README.md":
            content, name = path.read_bytes(), path.relative_to(ROOT / "data").as_posix()
            row = f"| `{name}` | {len(content):,} | `{hashlib.sha256(content).hexdigest()}` |"
            if row not in text:
                missing.append(row)
    assert missing == [], "these rows belong into data/README.md:\n" + "\n".join(missing)
    assert check_data(ROOT / "data") == []


def test_a_damaged_or_missing_file_is_found(tmp_path):
    content = b"weights"
    row = f"| `a.bin` | 7 | `{hashlib.sha256(content).hexdigest()}` |"
    assert check_data(tmp_path)
    (tmp_path / "README.md").write_text("no table")
    assert check_data(tmp_path)
    (tmp_path / "README.md").write_text(row)
    assert check_data(tmp_path) == ["a.bin is missing"]
    (tmp_path / "a.bin").write_bytes(b"Weights")
    assert check_data(tmp_path) == ["a.bin has other bytes than the list says"]
    (tmp_path / "a.bin").write_bytes(content)
    assert check_data(tmp_path) == []


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["sh .ci/install-browser", "exec make test"]


def test_missing_packages_are_named():
    script = str(ROOT / ".ci" / "missing-packages.py")
    whole = subprocess.run([sys.executable, script, "report", "test"], capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    lacking = subprocess.run([sys.executable, "-S", script, "report"], capture_output=True, text=True)
    assert lacking.returncode == 1
    assert "lacks packages that kdlab needs: torch>=2.11, numpy>=2" in lacking.stderr


@pytest.mark.parametrize("off", ["", "0", "no", "No", "false", "FALSE", "off"])
def test_make_full_can_be_switched_off_in_words(off):
    def lab(full):
        words = ["make", "-n", "lab", f"PYTHON={sys.executable}", f"FULL={full}"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "full=true" not in lab(off)
    assert "-p full=true" in lab("1")
    assert "-p full=true" in lab("yes")


def test_make_test_says_what_it_skips():
    words = ["make", "-n", "test", f"PYTHON={sys.executable}"]
    assert "-m pytest -rs " in subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_make_explains_itself_and_refuses_cuda_without_an_interpreter(tmp_path):
    def make(*arguments):
        return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True)

    assert "make lab" in make().stdout
    refused = make("lab", "DEVICE=cuda")
    assert refused.returncode != 0
    assert "PYTHON=/path/to/python" in refused.stderr
    bare = tmp_path / "python without packages"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    assert "lacks packages" in make("lab", "DEVICE=cuda", f"PYTHON={bare}").stderr
