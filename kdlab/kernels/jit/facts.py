"""What `kdlab doctor` says about CUDA kernels: compiler, headers, GPU, cache, and whether kernels run here."""

import importlib.util
from pathlib import Path

import torch

from kdlab.config import cache_folder
from kdlab.errors import KdlabError, UnsupportedDevice
from kdlab.kernels.jit import arch_of, kernel
from kdlab.kernels.jit.build import compile_build
from kdlab.kernels.jit.launch import driver_cuda
from kdlab.kernels.jit.toolchain import find_toolchain
from kdlab.kernels.kv_commit import BUILDS

PROBE = BUILDS[0]
"""A small source, compiled and loaded to see whether that works."""


def kernel_facts() -> dict[str, str | None]:
    """Return what kernels need and whether they are ready; without a GPU, no driver is asked.

    Returns:
        `arch`, `driver_cuda` (the newest CUDA that the driver runs), `nvrtc`, `cuda_headers`, `nvcc`, `flashmla`,
        `kernel_cache`, `kernels`; None for what is not there.
    """
    facts: dict[str, str | None] = dict.fromkeys(("arch", "driver_cuda", "nvrtc", "cuda_headers"))
    problem = None
    try:
        toolchain = find_toolchain()
        facts |= {
            "nvrtc": f"{toolchain.nvrtc_version} ({toolchain.nvrtc})",
            "cuda_headers": f"{toolchain.headers_version} ({toolchain.headers})",
        }
    except UnsupportedDevice as error:
        problem = str(error)
    facts |= {"nvcc": "not needed", "flashmla": _flashmla(), "kernel_cache": _cache()}
    device = torch.device("cuda")
    try:
        facts |= {"arch": arch_of(device), "driver_cuda": driver_cuda()}
        verdict = f"not ready: {problem}" if problem else _probe(device)
    except UnsupportedDevice as error:
        verdict = "not ready: " + "; ".join(filter(None, (str(error), problem)))
    return facts | {"kernels": verdict}


def _probe(device: torch.device) -> str:
    try:
        arch = arch_of(device)
        for name in compile_build(PROBE, arch)[0].kernels:
            kernel(PROBE, name, device)
    except KdlabError as error:
        return f"not ready: {error}"
    return f"ready on {arch}"


def _flashmla() -> str | None:
    """Say where FlashMLA's package lies, without importing it: that loads CUDA libraries."""
    found = importlib.util.find_spec("flash_mla")
    return None if found is None or found.origin is None else f"found ({Path(found.origin).parent})"


def _cache() -> str | None:
    try:
        folder = cache_folder() / "kernels"
    except KdlabError as error:
        return str(error)
    sizes = [path.stat().st_size for path in folder.glob("*.cubin")] if folder.is_dir() else []
    return f"{folder} ({len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB)"
