"""compute-sanitizer finds nothing in any kernel at small shapes, and finds what is put there for it to find.

memcheck runs the kernels that users run, every tensor an allocation of its own, so that a step beyond one is seen.
racecheck runs the builds whose barriers it can follow (docs/racecheck.md). Each case is a process: `pytest -n` helps.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kdlab.paths import CSRC
from tests.kernels.sanitized import CASES, TWINS

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 120
OPTIONS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}  # torch asks the driver what it may refuse
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}


def watched(tool, case):
    """What a tool says of one case of tests/kernels/sanitized.py."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        pytest.skip("compute-sanitizer of the CUDA toolkit is missing")
    command = [program, "--tool", tool, *OPTIONS[tool], sys.executable, "-m", "tests.kernels.sanitized", case]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "KDLAB_RACECHECK": str(int(tool == "racecheck")),
    }
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, cwd=REPOSITORY)
    return run.returncode, run.stdout + run.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tool", OPTIONS)
def test_nothing_is_found(tool, case):
    status, said = watched(tool, case)
    assert CLEAN[tool] in said, said
    assert status == 0, said
    assert re.search(r"^kernels: (.*)$", said, re.MULTILINE)[1].split() == sorted(CASES[case].kernels.split()), said


@pytest.mark.gpu
@pytest.mark.parametrize("fault", TWINS)
def test_what_is_put_there_is_found(fault):
    tool, _, found = TWINS[fault]
    _, said = watched(tool, fault)
    assert CLEAN[tool] not in said, said
    assert found in said, said


def test_every_kernel_stands_in_a_case():
    named = {name for case in CASES.values() for name in case.kernels.split()}
    kernel = re.compile(r'extern "C" __global__ (?:void\s+)?__launch_bounds__\([^()]*\)\s+(?:void )?(\w+)\(')
    texts = [file.read_text() for file in sorted(CSRC.glob("*.cu*"))]
    assert sum(text.count('extern "C"') for text in texts) == sum(len(kernel.findall(text)) for text in texts)
    assert named == {name for text in texts for name in kernel.findall(text)}
