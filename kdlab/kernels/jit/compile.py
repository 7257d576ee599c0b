"""The compiler's own process: a crash of NVRTC must not take a notebook's kernel with it.

It reads one JSON job a line and answers one JSON line each, until its input ends. It is run as a file, so that
starting it imports nothing of kdlab or torch: about 0.1 s.
"""

import base64
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
"""Of <sys/prctl.h>."""


def main() -> None:
    """Answer the jobs of standard input."""
    # Ends this process, even inside NVRTC, when whoever asked is killed and can no longer end it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    for line in sys.stdin:
        print(json.dumps(compile_job(json.loads(line))), file=answers, flush=True)


def compile_job(job: dict[str, Any]) -> dict[str, str]:
    """Compile one file to a cubin.

    Args:
        job: `nvrtc`, path of the library; `path` of the source; `options` for NVRTC.

    Returns:
        `log`, and `cubin` (base64) where it compiled.
    """
    load_nvrtc(Path(job["nvrtc"]))
    from cuda.bindings import nvrtc

    with open(job["path"], "rb") as file:
        source = file.read()

    def call(function: Any, *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {status.name}")
        return values[0] if values else None

    program = call(nvrtc.nvrtcCreateProgram, source, os.fsencode(job["path"]), 0, [], [])
    options = [os.fsencode(option) for option in job["options"]]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = bytearray(call(nvrtc.nvrtcGetProgramLogSize, program))
    call(nvrtc.nvrtcGetProgramLog, program, log)
    answer = {"log": log.decode(errors="replace").rstrip("\0\n ")}
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return answer | {"log": answer["log"] or status.name}
    cubin = bytearray(call(nvrtc.nvrtcGetCUBINSize, program))
    call(nvrtc.nvrtcGetCUBIN, program, cubin)
    return answer | {"cubin": base64.b64encode(cubin).decode()}


def load_nvrtc(library: Path) -> None:
    """Load this NVRTC, whose version stands in the cache key: the bindings then use it, whichever they would find."""
    for part in sorted(library.parent.glob("libnvrtc-builtins.so*")):  # NVRTC itself looks on the system's path alone
        ctypes.CDLL(str(part), os.RTLD_NOW | os.RTLD_GLOBAL)
    ctypes.CDLL(str(library), os.RTLD_NOW | os.RTLD_GLOBAL)


if __name__ == "__main__":
    main()
