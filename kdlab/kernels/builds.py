"""Every build that users meet, collected from the op modules: what the compile tests check and what can be prebuilt."""

import importlib
import pkgutil

import kdlab.kernels
from kdlab.kernels.jit import Build


def all_builds() -> tuple[Build, ...]:
    """Return `BUILDS` of every module of this room that has one, in the order of their names."""
    found: list[Build] = []
    for info in pkgutil.iter_modules(kdlab.kernels.__path__):
        if info.name != "builds":
            module = importlib.import_module(f"kdlab.kernels.{info.name}")
            found += getattr(module, "BUILDS", ())
    return tuple(dict.fromkeys(found))


def matrix_instruction(build: Build) -> str | None:
    """Return the tensor-core instruction that the machine code of a build must hold, None where it needs none."""
    stem = build.file.removesuffix(".cu")
    if stem.endswith("_wgmma"):
        return "HGMMA"
    return "HMMA" if stem.endswith("_mma") else None
