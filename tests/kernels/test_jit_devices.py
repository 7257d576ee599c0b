"""Where kernels cannot run: each reason has its own words, and no driver is touched; no GPU needed."""

import os
import subprocess
import sys

import pytest
import torch

from kdlab.errors import ArgumentError, UnsupportedDevice
from kdlab.kernels import jit
from kdlab.kernels.jit import Build, arch_of, kernel
from kdlab.kernels.jit.build import compile_build
from kdlab.kernels.jit.toolchain import find_toolchain
from kdlab.paths import REPOSITORY

ARCH, PLAIN = "sm_90a", Build("plain.cu")
CUDA = torch.device("cuda", 0)


def test_without_a_gpu_no_driver_is_touched(csrc):
    code = (
        "import sys, torch; from kdlab.kernels.jit import *\n"
        "torch.cuda.is_available = lambda: False\n"
        "torch.cuda._lazy_init = None  # whatever asks the driver, calls it\n"
        "device = torch.device('cuda')\n"
        "for call in (lambda: kernel(Build('plain.cu'), 'f', device), lambda: num_sms(device)):\n"
        "    try: call()\n"
        "    except kdlab.errors.UnsupportedDevice as error: print(error)\n"
        "print('cuda.core' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import kdlab.errors\n" + code],
        capture_output=True, text=True, timeout=60, check=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all("kernels need an NVIDIA GPU: " in line for line in lines[:2])
    assert lines[2] == "False"


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU of a capability of one's choice, for code that only asks torch."""

    def make(*capability):
        jit._arch_of_index.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA X1")

    yield make
    jit._arch_of_index.cache_clear()


def test_capabilities_have_their_architecture(gpu):
    for capability, arch in (((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")):
        gpu(*capability)
        assert arch_of(torch.device("cuda")) == arch
    gpu(8, 9)
    assert arch_of(CUDA) == "sm_89"
    with pytest.raises(UnsupportedDevice, match=r"there is no cuda:1, only 1"):
        arch_of(torch.device("cuda", 1))
    for capability in ((7, 5), (8, 6), (10, 3), (12, 1), (13, 0)):
        gpu(*capability)
        with pytest.raises(UnsupportedDevice, match=rf"NVIDIA X1 has .*{capability[0]}\.{capability[1]}; .*8\.0, 8\.9"):
            arch_of(CUDA)
    with pytest.raises(UnsupportedDevice, match="on a CUDA GPU, not on cpu"):
        arch_of(torch.device("cpu"))


def test_a_kernel_of_another_architecture_is_refused_before_it_is_compiled(csrc, compiled, gpu):
    gpu(12, 0)
    with pytest.raises(UnsupportedDevice, match=r"plain\.cu is for sm_90a; NVIDIA X1 is sm_120a"):
        kernel(Build("plain.cu", archs=jit.HOPPER), "scale", torch.device("cuda"))
    assert compiled == []
    for archs in (("sm_75",), (), ("sm_90",)):
        with pytest.raises(ArgumentError, match="archs"):
            Build("plain.cu", archs=archs)


def test_what_is_missing_is_named(csrc, monkeypatch):
    def with_missing(*patches):
        find_toolchain.cache_clear()
        with monkeypatch.context() as patch:
            for target, value in patches:
                if isinstance(target, str) and target.startswith("cuda.pathfinder."):
                    patch.setattr(target, value)
                else:
                    patch.setitem(sys.modules, target, value)
            with pytest.raises(UnsupportedDevice) as caught:
                compile_build(PLAIN, ARCH)
        find_toolchain.cache_clear()
        return str(caught.value)

    def not_found(name):
        raise RuntimeError(f'Failure finding "{name}.so"')

    install = r"pip install 'kdlab[gpu]'"
    nvrtc = with_missing(("cuda.pathfinder.load_nvidia_dynamic_lib", not_found))
    assert nvrtc.startswith("NVRTC, the CUDA compiler, is missing")
    headers = with_missing(("cuda.pathfinder.find_nvidia_header_directory", lambda name: None))
    assert headers.startswith("the CUDA headers (cuda_bf16.h")
    bindings = with_missing(("cuda.bindings", None))
    assert bindings.startswith("the package cuda-bindings is missing")
    assert all(install in message for message in (nvrtc, headers, bindings))
    with pytest.raises(UnsupportedDevice, match=r"NVRTC 13\.\d cannot compile for sm_990, only for sm_75"):
        compile_build(PLAIN, "sm_990")
    cubin, _ = compile_build(PLAIN, ARCH)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(UnsupportedDevice, match="cuda-core is missing"):
        jit.Kernel(cubin, "scale", CUDA, "plain.cu", None)
