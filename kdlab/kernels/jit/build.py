"""From a build to its cubin: the cache key, the disk cache, and the child process that compiles what is not there."""

import base64
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from kdlab.config import cache_folder, racecheck_builds
from kdlab.errors import ArgumentError, BuildError
from kdlab.kernels.jit.cache import Cubin, load_cubin, parse_resources, store_cubin
from kdlab.kernels.jit.source import Source, read_source
from kdlab.kernels.jit.toolchain import Toolchain, find_toolchain
from kdlab.paths import CSRC

PORTABLE = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
HOPPER = ("sm_90a",)
TIMEOUT_S = 120
_COMPILER = Path(__file__).with_name("compile.py")
# NOTE: beside a driver NVRTC keeps a cache of its own, and what comes from there brings no report of ptxas.
_OPTIONS = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v", "--no-cache")
_KEY_FORMAT = 2
"""Counts up when the meaning of an entry changes."""


@dataclass(frozen=True, slots=True)
class Build:
    """What is compiled: one `.cu` of `csrc/` with fixed constants, for these architectures.

    `defines` become `-DNAME=VALUE`. `shared_bytes` says per kernel the most dynamic shared memory that its op launches
    it with: the compile tests add it to the static part, and a launch with more is refused.
    """

    file: str
    defines: tuple[tuple[str, str | int], ...] = ()
    archs: tuple[str, ...] = PORTABLE
    shared_bytes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        unknown = [arch for arch in self.archs if arch not in PORTABLE]
        if unknown or not self.archs:
            raise ArgumentError("archs", f"some of {', '.join(PORTABLE)}", self.archs)

    def __str__(self) -> str:
        constants = ", ".join(f"{name}={value}" for name, value in self.defines)
        return f"{self.file} ({constants})" if constants else self.file

    @property
    def path(self) -> Path:
        """Where the source lies."""
        return CSRC / self.file


class Compiler:
    """A child process that compiles one job after another; a `with` block ends it. It starts with the first job."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the child runs)

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._errors.close()

    def compile(self, build: Build, arch: str, toolchain: Toolchain) -> Cubin:
        """Compile now, whatever the disk cache holds.

        Raises:
            BuildError: the source does not compile (with the compiler's log), or the compiler crashed or hangs.
        """
        what = f"{build} for {arch}"
        job = {"nvrtc": str(toolchain.nvrtc), "path": str(build.path)}
        answer = self._ask(job | {"options": _options(build, arch, toolchain)}, what, toolchain)
        if "cubin" not in answer:
            raise BuildError(f"{what} does not compile:\n{answer['log']}\n({toolchain})")
        return Cubin(base64.b64decode(answer["cubin"]), parse_resources(answer["log"]), answer["log"])

    def _ask(self, job: dict[str, Any], what: str, toolchain: Toolchain) -> dict[str, str]:
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(TIMEOUT_S, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            late = not timer.is_alive()
        except BrokenPipeError:  # it died before it read the job
            line, late = "", False
        finally:
            timer.cancel()
        if line.endswith("\n"):
            answer: dict[str, str] = json.loads(line)
            return answer
        raise BuildError(self._epitaph(what, late, toolchain))

    def _epitaph(self, what: str, late: bool, toolchain: Toolchain) -> str:
        assert self._process is not None
        status = self._process.wait()
        self._errors.seek(0)
        log = self._errors.read().decode(errors="replace").strip()
        self._stop()
        if late:
            reason = f"gave no answer within {TIMEOUT_S} s"
        elif status < 0:
            reason = f"crashed ({signal.Signals(-status).name})"
        else:
            reason = f"ended with status {status}"
        said = f"; it said:\n{log}" if log else ", and said nothing"
        return f"the compiler {reason} on {what}{said}\n({toolchain})"

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._errors.seek(0)
            self._errors.truncate()
            # -P: the script's own folder must not stand in its module path, where files bear names like `int4`.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_COMPILER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def compile_build(build: Build, arch: str, compiler: Compiler | None = None) -> tuple[Cubin, Source]:
    """Return the cubin of a build, from the disk cache or from the compiler, and the source that it was made of.

    Args:
        build: what to compile; `arch` need not be among its architectures.
        arch: `"sm_90a"`, ...
        compiler: a running one; None starts one where it is needed.

    Raises:
        BuildError: see `Compiler.compile`; or the cache folder cannot be written.
        UnsupportedDevice: compiler or headers are missing, or do not know `arch`.
    """
    toolchain, folder = find_toolchain(), cache_folder() / "kernels"
    for _ in range(5):
        source = read_source(build.path)
        key = _key(build, arch, source, toolchain)
        cubin = load_cubin(folder, key)
        if cubin is not None:
            return cubin, source
        toolchain.check_arch(arch)
        if compiler is None:
            with Compiler() as own:
                cubin = own.compile(build, arch, toolchain)
        else:
            cubin = compiler.compile(build, arch, toolchain)
        # The compiler read the files after us: what it saw is `source` only if nothing changed meanwhile.
        if read_source(build.path).digest == source.digest:
            store_cubin(folder, key, cubin, f"{build} for {arch}")
            return cubin, source
    raise BuildError(f"{build.path} or one of its includes changes faster than it compiles")


def compile_all(jobs: Iterable[tuple[Build, str]], *, workers: int) -> dict[tuple[Build, str], Cubin | BuildError]:
    """Compile many builds at once, into the disk cache: before a benchmark or a test, where one by one takes long.

    Args:
        jobs: pairs of build and architecture.
        workers: compilers that run side by side.

    Returns:
        The cubin of each pair, or the error that a call of its kernel would raise.
    """
    compilers: SimpleQueue[Compiler] = SimpleQueue()

    def work(job: tuple[Build, str]) -> Cubin | BuildError:
        compiler = compilers.get()
        try:
            return compile_build(*job, compiler)[0]
        except BuildError as error:
            return error
        finally:
            compilers.put(compiler)

    unique = list(dict.fromkeys(jobs))
    running = [Compiler() for _ in range(workers)]
    for compiler in running:
        compilers.put(compiler)
    try:
        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(unique, pool.map(work, unique), strict=True))
    finally:
        for compiler in running:
            compiler.__exit__()


def _defines(build: Build) -> tuple[tuple[str, str | int], ...]:
    return (*build.defines, ("RACECHECK", 1)) if racecheck_builds() else build.defines


def _options(build: Build, arch: str, toolchain: Toolchain) -> list[str]:
    defines = [f"--define-macro={name}={value}" for name, value in _defines(build)]
    folders = [f"--include-path={folder}" for folder in (CSRC, toolchain.headers)]
    return [f"--gpu-architecture={arch}", *_OPTIONS, *defines, *folders]


def _key(build: Build, arch: str, source: Source, toolchain: Toolchain) -> str:
    parts = [_KEY_FORMAT, arch, _OPTIONS, build.file, _defines(build), source.digest, toolchain.identity]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
