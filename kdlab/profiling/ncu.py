"""Nsight Compute as a child process: run a command under `ncu`, read its CSV back, say in one sentence what went wrong.

Counting runs every kernel alone with flushed caches, as often as the counters ask, so nothing is timed for a comparison
here.
"""

import csv
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence

from kdlab.errors import KdlabError, UnsupportedDevice

_FIXES = {
    "ERR_NVGPUCTRPERM": "this user may not read the counters (the driver's NVreg_RestrictProfilingToAdminUsers)",
    "LibraryNotLoaded": "Nsight Compute finds no profiling library on this machine",
}


def run_ncu(
    command: Sequence[str], metrics: Sequence[str], *, options: Sequence[str] = (), timeout_s: float
) -> list[dict[str, str]]:
    """Run a command under Nsight Compute, and return a dictionary for every kernel that it counted, in launch order.

    Args:
        command: a program and its arguments; it marks with `torch.cuda.profiler.start()` where counting begins.
        metrics: of Nsight Compute, in base units.
        options: further ones of `ncu`.
        timeout_s: the child and what it started are ended after that.

    Raises:
        UnsupportedDevice: there is no `ncu`, or it may not or cannot read counters here.
        KdlabError: the command failed, or took too long.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise UnsupportedDevice("hardware counters: Nsight Compute (`ncu`) is not on the PATH")
    page = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    page += ["--metrics", ",".join(metrics)]
    status, text = _run([ncu, *page, "--profile-from-start", "off", *options, *command], timeout_s)
    for sign, meaning in _FIXES.items():
        if sign in text:
            raise UnsupportedDevice(f"hardware counters: {meaning}")
    if status:
        said = [line for line in text.strip().splitlines() if not line.startswith("==PROF==")]
        own = [line for line in said if not line.startswith("==")]  # the program's last words say more than ncu's
        last = (own or said or ["no output"])[-1]
        raise KdlabError(f"hardware counters: ncu ended with status {status}: {last}")
    return read_csv(text)


def read_csv(text: str) -> list[dict[str, str]]:
    """Read what `ncu --csv --page raw` prints: the program's own output, names, units, then one line a launch."""
    lines = text.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith('"ID",')), None)
    if first is None:
        return []
    table = list(csv.DictReader(line for line in lines[first:] if line.startswith('"')))
    return table[1:]  # the first is the units


def number(text: str | None) -> float | None:
    """The number in a cell, whose thousands are separated; None where the GPU has no such counter."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _run(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Run in a session of its own, so that a late one can be ended with all that it started."""
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        text, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise KdlabError(f"hardware counters: it took longer than {timeout_s:g} s under ncu") from late
    return child.returncode, text
