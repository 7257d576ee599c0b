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
    stem, constants = build.file.removesuffix(".cu"), dict(build.defines)
    in_float32, wide = constants.get("DTYPE") == 0, int(constants.get("TILE_EIGHTS", 0)) > 3
    if "wgmma" in stem or wide:
        return "HGMMA"
    if "mma" in stem or stem in ("draft_attention", "skinny_linear"):
        return "HMMA"
    # The experts of a float32 model are multiplied in float32, outside the tensor cores.
    return "HMMA" if stem.startswith("moe") and not in_float32 else None
