"""CUDA kernels compiled when they are first called: `kernel(build, name, device).launch(grid, block, ...)`.

An op module names its builds (`Build`), asks for a kernel at every call and launches it. Asking is cheap when nothing
changed, and after an edit of a `.cu` or `.cuh` the next call compiles: in a child process, because a compiler that
crashes must not take a notebook's kernel with it, and into a cache on disk. `source` knows the files,
`toolchain` the compiler, `build` compiles, `cache` keeps, `launch` launches, `arguments` turns what an op passes into
what the driver gets. `ops` makes an op known to torch; `layouts` spares it checks that the same tensors have passed.

Where an op is called hundreds of times in a row (an eager round, a prefill), three things are looked up and not done
again: whether sources are current (`looking_once`), whether arguments are right (`layouts.by_layout`), and how their
types are converted (`Kernel.launch`).
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kdlab.errors import UnsupportedDevice
from kdlab.kernels.jit.build import HOPPER, PORTABLE, Build, compile_all, compile_build
from kdlab.kernels.jit.launch import Kernel
from kdlab.kernels.jit.source import Source, read_source

__all__ = ["HOPPER", "PORTABLE", "Build", "Kernel", "arch_of", "compile_all", "kernel", "looking_once", "num_sms"]

ARCHS = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}
"""Compute capabilities and the architectures that are compiled for them."""


@dataclass(slots=True)
class _Loaded:
    kernel: Kernel
    source: Source
    looked_in: object | None = None
    """The block of `looking_once` in which the files were looked at last."""


class _Block(threading.local):
    """The block of `looking_once` that this thread is in."""

    token: object | None = None


_loaded: dict[tuple[Build, str, torch.device], _Loaded] = {}
_block = _Block()
# Kernels of texts that were edited since: captured graphs and queued launches still run their machine code.
_outdated: list[Kernel] = []
_lock = threading.Lock()


def kernel(build: Build, name: str, device: torch.device) -> Kernel:
    """Return the `extern "C" __global__` function `name` of `build`, compiled for the GPU at hand.

    It compiles when source, includes, constants, compiler or architecture changed, also in a running process; while a
    CUDA graph is being captured, files are not looked at.

    Args:
        build: the source and its constants.
        name: of the function.
        device: the GPU; an index is optional.

    Raises:
        UnsupportedDevice: no GPU, no driver, no compiler, or an architecture that `build` is not for.
        BuildError: the source does not compile: the message has the compiler's log with file and line.
        ArgumentError: the source has no such kernel.
    """
    if device.index is None:
        device = torch.device("cuda", _index_of(device))
    found = _loaded.get((build, name, device))
    if found is not None:
        token = _block.token
        if (token is not None and found.looked_in is token) or torch.cuda.is_current_stream_capturing():
            return found.kernel
        if found.source.is_current():
            found.looked_in = token
            return found.kernel
    with _lock:
        return _refresh(build, name, device)


@contextlib.contextmanager
def looking_once() -> Iterator[None]:
    """Look at the files of a kernel at its first launch inside alone: for many launches, such as a round's.

    To look is half of what a small launch costs the host. An edit meanwhile takes effect after the block.
    """
    outer = _block.token
    _block.token = outer or object()
    try:
        yield
    finally:
        _block.token = outer


def _refresh(build: Build, name: str, device: torch.device) -> Kernel:
    arch = arch_of(device)
    if arch not in build.archs:
        gpu = torch.cuda.get_device_name(device)
        raise UnsupportedDevice(f"{build.file} is for {', '.join(build.archs)}; {gpu} is {arch}")
    old, source = _loaded.get((build, name, device)), read_source(build.path)
    if old is not None and old.source.digest == source.digest:
        loaded = old.kernel  # touched, not edited
    else:
        cubin, source = compile_build(build, arch)
        loaded = Kernel(cubin, name, device, str(build), dict(build.shared_bytes).get(name))
        if old is not None:
            _outdated.append(old.kernel)
    _loaded[build, name, device] = _Loaded(loaded, source, _block.token)
    return loaded


def arch_of(device: torch.device) -> str:
    """Return the architecture that kernels are compiled for on this GPU, `"sm_90a"` for one.

    Raises:
        UnsupportedDevice: `device` is no GPU, or there is none, or kdlab has no kernels for it.
    """
    return _arch_of_index(_index_of(device))


def num_sms(device: torch.device) -> int:
    """Return how many multiprocessors the GPU has; raises as `arch_of` does."""
    return _num_sms_of_index(_index_of(device))


def _index_of(device: torch.device) -> int:
    if device.type != "cuda":
        raise UnsupportedDevice(f"kernels run on a CUDA GPU, not on {device.type}")
    if device.index is None:
        _require_gpu()
        return torch.cuda.current_device()
    return device.index


def _require_gpu() -> None:
    # Before anything else: calls into the CUDA driver hang for ever on a machine that has none.
    if not torch.cuda.is_available():
        why = "this torch is a CPU build" if torch.version.cuda is None else "torch finds no GPU or no working driver"
        raise UnsupportedDevice(f"kernels need an NVIDIA GPU: {why}")


@functools.cache
def _arch_of_index(index: int) -> str:
    _require_gpu()
    if index >= torch.cuda.device_count():
        raise UnsupportedDevice(f"there is no cuda:{index}, only {torch.cuda.device_count()} GPUs")
    capability = torch.cuda.get_device_capability(index)
    if capability not in ARCHS:
        gpu, known = torch.cuda.get_device_name(index), ", ".join(map(_dotted, ARCHS))
        raise UnsupportedDevice(f"{gpu} has compute capability {_dotted(capability)}; kdlab's kernels are for {known}")
    return ARCHS[capability]


@functools.cache
def _num_sms_of_index(index: int) -> int:
    _arch_of_index(index)
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
