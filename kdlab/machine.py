"""Facts about the machine a result was made on; a fact that cannot be learned is None, never a guess."""

import hashlib
import os
import platform
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

GPU_STATE_FIELDS = ("sm_clock_mhz", "memory_clock_mhz", "gpu_temperature_c")


def machine_facts() -> dict[str, Any]:
    """Return what does not change while a process runs: software versions, CPU, GPU and a hash of the host name."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "os": platform.platform(),
        "hostname_hash": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        "cpu": cpu_model(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **gpu_facts(),
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the name of the first CPU that Linux lists, or None where there is no such list or name."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def gpu_facts() -> dict[str, Any]:
    """Return torch's CUDA runtime, and driver, size and present state of the current GPU, None each without one."""
    names = ("cuda", "driver", "gpu", "gpu_uuid", "gpu_count", "gpu_memory_bytes", "gpu_sm_count")
    facts: dict[str, Any] = dict.fromkeys(names) | {"cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        return facts | dict.fromkeys(GPU_STATE_FIELDS)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts |= {
        "driver": _ask_nvml(lambda nvml, _: _text(nvml.nvmlSystemGetDriverVersion())),
        "gpu": properties.name,
        "gpu_uuid": _gpu_uuid(),
        "gpu_count": torch.cuda.device_count(),
        "gpu_memory_bytes": properties.total_memory,
        "gpu_sm_count": properties.multi_processor_count,
    }
    return facts | gpu_state()


def gpu_state() -> dict[str, float | None]:
    """Return the current GPU's clocks and temperature at this moment, None each without a GPU or without NVML."""
    if not torch.cuda.is_available():
        return dict.fromkeys(GPU_STATE_FIELDS)
    return {
        "sm_clock_mhz": _ask_nvml(lambda nvml, gpu: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))),
        "memory_clock_mhz": _ask_nvml(lambda nvml, gpu: float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM))),
        "gpu_temperature_c": _ask_nvml(
            lambda nvml, gpu: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
        ),
    }


def _ask_nvml(question: Callable[[Any, Any], Any]) -> Any:
    """Answer `question(nvml, handle of torch's current GPU)`, or None when NVML is not installed or does not know."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # NVML counts every GPU of the host and torch only the visible ones: the uuid is the name they share.
        return question(pynvml, pynvml.nvmlDeviceGetHandleByUUID((_gpu_uuid() or "").encode()))
    except pynvml.NVMLError:
        return None


def _gpu_uuid() -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
