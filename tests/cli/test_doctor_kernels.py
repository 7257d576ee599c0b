"""What `kdlab doctor` says about kernels: a verdict for each thing that may be missing, and never a call that hangs."""

import pytest
import torch

from kdlab.cli.doctor import inspect_machine
from kdlab.errors import BuildError, UnsupportedDevice
from kdlab.kernels.jit import facts as jit_facts
from kdlab.kernels.jit.facts import kernel_facts


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a Hopper GPU whose driver is never asked."""
    monkeypatch.setattr(jit_facts, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(jit_facts, "driver_cuda", lambda: "13.0")
    monkeypatch.setattr(jit_facts, "kernel", lambda build, name, device: None)


def test_without_a_gpu_the_compiler_is_named_all_the_same(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", None)
    facts = kernel_facts()
    assert facts["kernels"].startswith("not ready: kernels need an NVIDIA GPU: ")
    assert (facts["arch"], facts["driver_cuda"], facts["nvcc"]) == (None, None, "not needed")
    assert facts["nvrtc"].startswith("13.")
    assert facts["cuda_headers"].startswith("13.")
    assert inspect_machine()["verdict"].startswith("ready on the CPU")


def test_a_gpu_that_runs_kernels_is_ready(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("KDLAB_CACHE", str(tmp_path))
    facts = kernel_facts()
    assert facts["kernels"] == "ready on sm_90a"
    assert kernel_facts()["kernel_cache"].startswith(f"{tmp_path}/kernels (1 kernels, ")


def test_what_is_missing_stands_in_the_verdict(gpu, monkeypatch, tmp_path):
    def fail(*_):
        raise UnsupportedDevice("NVRTC is missing: install it")

    with monkeypatch.context() as patch:
        patch.setattr(jit_facts, "find_toolchain", fail)
        facts = kernel_facts()
        assert (facts["arch"], facts["nvrtc"]) == ("sm_90a", None)
        assert facts["kernels"] == "not ready: NVRTC is missing: install it"
    with monkeypatch.context() as patch:
        patch.setattr(jit_facts, "kernel", fail)
        assert kernel_facts()["kernels"] == "not ready: NVRTC is missing: install it"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KDLAB_CACHE", str(tmp_path / "file"))
    assert "KDLAB_CACHE" in kernel_facts()["kernels"]

    def crash(*_):
        raise BuildError("the compiler crashed")

    monkeypatch.setattr(jit_facts, "compile_build", crash)
    assert kernel_facts()["kernels"] == "not ready: the compiler crashed"


def test_flashmla_is_found_without_importing_it(monkeypatch, tmp_path):
    (tmp_path / "flash_mla").mkdir()
    (tmp_path / "flash_mla" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert kernel_facts()["flashmla"] == f"found ({tmp_path}/flash_mla)"


@pytest.mark.gpu
def test_this_gpu_is_ready():
    facts = kernel_facts()
    assert facts["kernels"] == f"ready on {facts['arch']}"
    assert facts["driver_cuda"]
