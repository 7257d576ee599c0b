"""Facts about the machine a result was made on; a fact that cannot be learned is None, never a guess."""

import contextlib
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


def machine_facts(device: torch.device | None = None) -> dict[str, Any]:
    """Return software versions, CPU, a hash of the host name, and the GPU of a run on `device` (see `gpu_facts`)."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "os": platform.platform(),
        "hostname_hash": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        "cpu": cpu_model(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **gpu_facts(device),
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the name of the first CPU that Linux lists, or None where there is no such list or name."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def gpu_facts(device: torch.device | None = None) -> dict[str, Any]:
    """Return torch's CUDA runtime, and driver, size and present state of the GPU that a run uses.

    Args:
        device: of the run; None takes the current GPU. A CPU run has no GPU, even where the machine has one.

    Returns:
        `cuda`, `driver`, `gpu`, `gpu_uuid`, `gpu_count`, `gpu_memory_bytes`, `gpu_sm_count` and GPU_STATE_FIELDS.
    """
    names = ("driver", "gpu", "gpu_uuid", "gpu_count", "gpu_memory_bytes", "gpu_sm_count")
    facts: dict[str, Any] = {"cuda": torch.version.cuda, **dict.fromkeys(names)}
    if _uses_gpu(device):
        properties = torch.cuda.get_device_properties(_index(device))
        facts |= {
            "driver": _ask_nvml(device, lambda nvml, _: _text(nvml.nvmlSystemGetDriverVersion())),
            "gpu": properties.name,
            "gpu_uuid": _gpu_uuid(device),
            "gpu_count": torch.cuda.device_count(),
            "gpu_memory_bytes": properties.total_memory,
            "gpu_sm_count": properties.multi_processor_count,
        }
    return facts | gpu_state(device)


def gpu_state(device: torch.device | None = None) -> dict[str, float | None]:
    """Return clocks and temperature of a run's GPU at this moment, None each without a GPU or without NVML."""
    if not _uses_gpu(device):
        return dict.fromkeys(GPU_STATE_FIELDS)

    def clock(name: str) -> float | None:
        return _ask_nvml(device, lambda nvml, gpu: float(nvml.nvmlDeviceGetClockInfo(gpu, getattr(nvml, name))))

    def temperature(nvml: Any, gpu: Any) -> float:
        return float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))

    values = (clock("NVML_CLOCK_SM"), clock("NVML_CLOCK_MEM"), _ask_nvml(device, temperature))
    return dict(zip(GPU_STATE_FIELDS, values, strict=True))


def link_facts(device: torch.device | None = None) -> dict[str, Any]:
    """Return what a run over several GPUs goes by: NCCL's version and the links of its own GPU; None each without one.

    Returns:
        `nccl`, `nvlinks` (of the GPU, that are up) and `peer_access` (to the memory of every other visible GPU).
    """
    if not _uses_gpu(device):
        return dict.fromkeys(("nccl", "nvlinks", "peer_access"))

    def nvlinks(nvml: Any, gpu: Any) -> int | None:
        states = []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            with contextlib.suppress(nvml.NVMLError):  # the GPU has fewer
                states.append(int(nvml.nvmlDeviceGetNvLinkState(gpu, link)))
        return sum(states) if states else None

    own = _index(device)
    others = (index for index in range(torch.cuda.device_count()) if index != own)
    return {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "nvlinks": _ask_nvml(device, nvlinks),
        "peer_access": all(torch.cuda.can_device_access_peer(own, other) for other in others),
    }


def _uses_gpu(device: torch.device | None) -> bool:
    return (device is None or device.type == "cuda") and torch.cuda.is_available()


def _index(device: torch.device | None) -> int:
    return torch.cuda.current_device() if device is None or device.index is None else device.index


def _ask_nvml(device: torch.device | None, question: Callable[[Any, Any], Any]) -> Any:
    """Answer `question(nvml, NVML's handle of the GPU)`, or None when NVML is not installed or does not know."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # NVML counts every GPU of the host and torch only the visible ones: the uuid is the name they share.
        return question(pynvml, pynvml.nvmlDeviceGetHandleByUUID((_gpu_uuid(device) or "").encode()))
    except pynvml.NVMLError:
        return None


def _gpu_uuid(device: torch.device | None) -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(_index(device)), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
