"""What tests of the JIT share: a folder of sources, an empty cache, a list of what was compiled."""

import pytest

from kdlab.kernels import jit
from kdlab.kernels.jit import build as jit_build
from tests.kernels.jit_sources import write_sources


@pytest.fixture
def csrc(tmp_path, monkeypatch):
    """A folder of sources and an empty cache."""
    monkeypatch.setenv("KDLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jit_build, "CSRC", tmp_path)
    monkeypatch.setattr(jit, "_loaded", {})
    return write_sources(tmp_path)


@pytest.fixture
def compiled(monkeypatch):
    """The list of what is really compiled."""
    found, compile_now = [], jit_build.Compiler.compile

    def spy(self, build, arch, toolchain):
        found.append(f"{build} for {arch}")
        return compile_now(self, build, arch, toolchain)

    monkeypatch.setattr(jit_build.Compiler, "compile", spy)
    return found
