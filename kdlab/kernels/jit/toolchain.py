"""The compiler and its headers in this environment: NVRTC and CUDA headers of pip or conda packages, no toolkit."""

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from kdlab.errors import UnsupportedDevice

HOW_TO_INSTALL = "pip install 'kdlab[gpu]' (conda users: environment.yml)"
_HEADERS = ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "cuda_fp16.hpp", "cuda_fp8.h", "cuda_fp8.hpp")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """NVRTC and the CUDA headers."""

    nvrtc: Path
    nvrtc_version: str
    headers: Path
    headers_version: str
    archs: tuple[int, ...]
    """Compute capabilities that NVRTC can compile for, as 10 * major + minor."""
    identity: str
    """Stands in the cache key; the same wherever the same packages are installed."""

    def __str__(self) -> str:
        return f"NVRTC {self.nvrtc_version}, CUDA headers {self.headers_version}"

    def check_arch(self, arch: str) -> None:
        """Raise UnsupportedDevice when NVRTC is too old (or too new) for `arch`."""
        if int("".join(filter(str.isdigit, arch))) not in self.archs:
            known = ", ".join(f"sm_{number}" for number in self.archs)
            raise UnsupportedDevice(f"NVRTC {self.nvrtc_version} cannot compile for {arch}, only for {known}")


@functools.cache
def find_toolchain() -> Toolchain:
    """Find the compiler and its headers. Loads NVRTC's library, never the driver's.

    Raises:
        UnsupportedDevice: a package is missing: the message names it and says how to install it.
    """
    nvrtc, version, archs = _find_nvrtc()
    headers = _find_headers()
    digest = hashlib.sha256()
    for name in _HEADERS:
        file = headers / name
        digest.update(name.encode() + (file.read_bytes() if file.is_file() else b""))
    # The library's version has no patch level, its real name (conda) or its size (pip) tells two builds apart.
    identity = f"nvrtc {version} {nvrtc.resolve().name} {nvrtc.stat().st_size} headers {digest.hexdigest()}"
    return Toolchain(nvrtc, version, headers, _headers_version(headers), archs, identity)


def _find_nvrtc() -> tuple[Path, str, tuple[int, ...]]:
    try:
        from cuda import pathfinder
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise UnsupportedDevice(f"the package cuda-bindings is missing ({error}): {HOW_TO_INSTALL}") from error
    try:
        library = Path(str(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path))
        status, major, minor = nvrtc.nvrtcVersion()
        _, archs = nvrtc.nvrtcGetSupportedArchs()
    except (RuntimeError, OSError) as error:  # pathfinder's "not found" is a RuntimeError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedDevice(f"NVRTC, the CUDA compiler, is missing ({reason}): {HOW_TO_INSTALL}") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise UnsupportedDevice(f"NVRTC, the CUDA compiler, does not run ({status.name}): {HOW_TO_INSTALL}")
    return library, f"{major}.{minor}", tuple(archs)


def _find_headers() -> Path:
    from cuda import pathfinder

    found = pathfinder.find_nvidia_header_directory("cudart")
    if not found or not (Path(found) / "cuda_bf16.h").is_file():
        raise UnsupportedDevice(
            f"the CUDA headers (cuda_bf16.h, of the package nvidia-cuda-runtime) are missing: {HOW_TO_INSTALL}"
        )
    return Path(found)


def _headers_version(headers: Path) -> str:
    try:
        text = (headers / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return "unknown"
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else "unknown"
