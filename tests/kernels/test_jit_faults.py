"""Nothing that happens to a compiler, a cache or another process hurts the one who asked; no GPU needed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdlab.errors import ArgumentError, BuildError
from kdlab.kernels.jit import Build, compile_all
from kdlab.kernels.jit import build as jit_build
from kdlab.kernels.jit.build import compile_build
from kdlab.kernels.jit.cache import load_cubin
from kdlab.kernels.jit.toolchain import find_toolchain
from kdlab.paths import REPOSITORY

ARCH, PLAIN = "sm_90a", Build("plain.cu")


def compiler_that(monkeypatch, folder, code):
    """Put a program in the place of the compiler; it has read its first job when `code` runs."""
    path = folder / "compiler.py"
    path.write_text(f"import os, signal, sys, time\nsys.stdin.readline()\n{code}\n")
    monkeypatch.setattr(jit_build, "_COMPILER", path)


def entries(csrc):
    return sorted(path.name for path in (csrc / "cache" / "kernels").iterdir())


def test_a_compile_error_shows_file_line_and_message(csrc):
    (csrc / "factor.cuh").write_text("#define FACTOR 2\n__device__ int broken() { return missing; }\n")
    with pytest.raises(BuildError) as caught:
        compile_build(Build("plain.cu", (("DTYPE", 1),)), ARCH)
    message = str(caught.value)
    assert "plain.cu (DTYPE=1) for sm_90a does not compile" in message
    assert f'{csrc / "factor.cuh"}(2): error: identifier "missing" is undefined' in message
    assert "NVRTC 13" in message
    assert not (csrc / "cache").exists()
    (csrc / "factor.cuh").write_text("#define FACTOR 2\n")
    compile_build(PLAIN, ARCH)


@pytest.mark.parametrize(
    ("text", "what"),
    [('#include "gone.cuh"', r"gone\.cuh"), ("#include <cstdint>", "cstdint"), (None, "cannot be read")],
)
def test_a_missing_file_is_named(csrc, text, what):
    path = csrc / "plain.cu"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(BuildError, match=rf"plain\.cu.*\n?.*{what}"):
        compile_build(PLAIN, ARCH)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"crashed \(SIGSEGV\) on plain\.cu for sm_90a, and said nothing"),
        ("print('last words', file=sys.stderr, flush=True); os.abort()", r"crashed \(SIGABRT\)(.|\n)*last words"),
        ("sys.exit(3)", "ended with status 3"),
        ("print('{\"log\":', end='', flush=True); os._exit(0)", "ended with status 0"),
        ("time.sleep(60)", "gave no answer within 1 s"),
    ],
)
def test_a_compiler_that_dies_or_hangs_is_an_error_that_one_survives(csrc, monkeypatch, code, what):
    with monkeypatch.context() as patch:
        patch.setattr(jit_build, "TIMEOUT_S", 1)
        compiler_that(patch, csrc, code)
        with pytest.raises(BuildError, match=what):
            compile_build(PLAIN, ARCH)
    assert compile_build(PLAIN, ARCH)[0].kernels


def test_a_crash_takes_no_other_build_with_it(csrc):
    (csrc / "bad.cu").write_text("nonsense")
    builds = [PLAIN, Build("bad.cu"), Build("launch.cu"), PLAIN]
    found = compile_all([(build, arch) for build in builds for arch in ("sm_80", ARCH)], workers=2)
    assert len(found) == 6
    for (build, _), result in found.items():
        assert isinstance(result, BuildError) == (build.file == "bad.cu")


@pytest.mark.parametrize("part", ["cubin", "json"])
@pytest.mark.parametrize("damage", ["gone", b"", b"{}", b"[]", b"\xff\x00" * 50, "cut"])
def test_a_damaged_entry_is_made_again(csrc, compiled, part, damage):
    good, _ = compile_build(PLAIN, ARCH)
    path = next((csrc / "cache" / "kernels").glob(f"*.{part}"))
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else damage)
    again, _ = compile_build(PLAIN, ARCH)
    assert (again.kernels, len(compiled)) == (good.kernels, 2)
    assert load_cubin(path.parent, path.stem) == again
    assert len(entries(csrc)) == 2


def test_a_folder_that_cannot_be_written_is_named(csrc, monkeypatch):
    (csrc / "file").write_text("")
    monkeypatch.setenv("KDLAB_CACHE", str(csrc / "file" / "deeper"))
    with pytest.raises(BuildError, match=r"cannot be kept in .*/file/deeper/kernels .*KDLAB_CACHE"):
        compile_build(PLAIN, ARCH)


def test_without_a_home_a_variable_is_asked_for(csrc, monkeypatch):
    monkeypatch.delenv("KDLAB_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ArgumentError, match="KDLAB_CACHE"):
        compile_build(PLAIN, ARCH)


def another_process(csrc, cache, code="compile_build(Build('plain.cu'), 'sm_90a')"):
    script = (
        "import kdlab.kernels.jit.build as b\nfrom pathlib import Path\nfrom kdlab.kernels.jit.build import *\n"
        f"b.CSRC = Path({str(csrc)!r})\nprint('go', flush=True)\n{code}\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "KDLAB_CACHE": str(cache)}
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)


def test_two_processes_at_once_both_end_well(csrc, compiled):
    both = [another_process(csrc, csrc / "cache") for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    compile_build(PLAIN, ARCH)
    assert (len(entries(csrc)), compiled) == (2, [])


def test_a_process_killed_while_it_compiles_leaves_nothing_in_the_way(csrc):
    steps = "\n".join(f"x = sinf(x * {i}.5f) + cosf(x);" for i in range(25))  # seconds of work for the compiler
    text = f'extern "C" __global__ void slow(float* y) {{ float x = y[0];\n{steps}\ny[0] = x; }}'
    (csrc / "slow.cu").write_text(text)
    process = another_process(csrc, csrc / "cache", "compile_build(Build('slow.cu'), 'sm_90a'); print('ended')")
    assert process.stdout.readline() == "go\n"
    while not (children := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
        time.sleep(0.01)
    time.sleep(0.3)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert process.stdout.read() == "", "it was killed too late"
    assert not (csrc / "cache").exists()
    wait_until(lambda: not is_running(children[0]))
    (csrc / "cache" / "kernels").mkdir(parents=True)
    fresh, stray = (csrc / "cache" / "kernels" / f".unfinished-{name}" for name in ("fresh", "stray"))
    fresh.write_bytes(b"half")
    stray.write_bytes(b"half")
    os.utime(stray, (time.time() - 7200,) * 2)
    cubin, _ = compile_build(Build("slow.cu"), ARCH)
    assert list(cubin.kernels) == ["slow"]
    assert (fresh.exists(), stray.exists()) == (True, False)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_the_compilers_process_is_light(csrc):
    toolchain = find_toolchain()
    job = {"nvrtc": str(toolchain.nvrtc), "path": str(csrc / "cluster.cu")}
    job["options"] = jit_build._options(Build("cluster.cu"), ARCH, toolchain)
    command = [sys.executable, "-X", "importtime", "-P", str(jit_build._COMPILER)]
    done = subprocess.run(command, input=json.dumps(job) + "\n", capture_output=True, text=True, timeout=60)
    assert "cubin" in json.loads(done.stdout)
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert {"json", "cuda"} <= modules
    assert not modules & {"torch", "numpy", "kdlab", "pandas"}
