"""The child process that executes one notebook: `python -P kernel_process.py`, a JSON job on standard input.

It imports nothing of kdlab, so that a notebook runs with the kdlab of its own kernel. Events go to standard output, one
JSON object a line; whatever the kernel itself writes goes to standard error. When standard input closes, the parent is
gone and so is the reason to run.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

KERNEL_NAME = "kdlab-run"
LAUNCH = """
import os, sys
with open({pid_file!r}, "w") as file:
    file.write(str(os.getpid()))
if {package_root!r} not in sys.path:
    sys.path.append({package_root!r})
from ipykernel.kernelapp import launch_new_instance
launch_new_instance()
"""
SOCKET_PATH_LIMIT = 90  # bytes; Linux admits 107 for a Unix socket, and the port's name follows


def main() -> int:
    """Run the job on standard input; returns the exit status."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    folder = Path(job["folder"])
    _use_private_folders(folder, job)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        _execute(job, lambda event: print(json.dumps(event), file=events))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0]}), file=events)
        return 1
    return 0


def _use_private_folders(folder: Path, job: dict[str, Any]) -> None:
    """Make the kernel's description and point Jupyter and IPython at folders of this run alone."""
    spec = folder / "jupyter" / "kernels" / KERNEL_NAME
    spec.mkdir(parents=True)
    launch = LAUNCH.format(pid_file=str(folder / "kernel.pid"), package_root=job["package_root"])
    argv = [sys.executable, "-P", "-c", launch, "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "kdlab", "language": "python"}))
    for name, value in job["environment"].items():
        os.environ[name] = value
    os.environ["JUPYTER_PATH"] = str(folder / "jupyter")
    os.environ["JUPYTER_RUNTIME_DIR"] = os.environ["JUPYTER_CONFIG_DIR"] = str(folder / "runtime")
    os.environ["IPYTHONDIR"] = str(folder / "ipython")


def _end_with_parent(folder: Path) -> None:
    sys.stdin.read()
    with contextlib.suppress(OSError, ValueError):  # there is no kernel yet, or no more
        os.killpg(int((folder / "kernel.pid").read_text()), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _literal(path: str) -> str:
    # papermill takes every path for a format string.
    return path.replace("{", "{{").replace("}", "}}")


def _execute(job: dict[str, Any], tell: Any) -> None:
    import papermill
    from jupyter_client.manager import AsyncKernelManager

    class PrivateKernelManager(AsyncKernelManager):
        """Talks to the kernel over sockets in the run's own folder, which no other user can reach."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.connection_file = str(Path(job["folder"]) / "connection.json")
            address = str(Path(job["folder"]) / "kernel")
            if len(os.fsencode(address)) <= SOCKET_PATH_LIMIT:
                self.transport, self.ip = "ipc", address

    papermill.execute_notebook(
        _literal(job["output"]),
        _literal(job["output"]),
        parameters=job["parameters"],
        kernel_name=KERNEL_NAME,
        language="python",
        cwd=job["cwd"],
        progress_bar=False,
        start_timeout=60,
        execution_timeout=job["cell_timeout_s"],
        kernel_manager_class=PrivateKernelManager,
        shutdown_kernel="immediate",
        on_cell_start=_CellCounter(tell),
    )


class _CellCounter:
    """Tells the number of each code cell that starts, as the notebook counts: without the cell that papermill adds."""

    def __init__(self, tell: Any) -> None:
        self._tell, self._added = tell, 0

    def __call__(self, cell: Any, cell_index: int) -> None:
        if "injected-parameters" in cell.metadata.get("tags", []):
            self._added += 1
        elif cell.cell_type == "code":
            self._tell({"cell": cell_index + 1 - self._added})


if __name__ == "__main__":
    sys.exit(main())
