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

from kdlab.kernels.builds import all_builds
from kdlab.paths import CSRC
from tests.kernels.planted import TWINS
from tests.kernels.sanitized import CASES, SWITCHES, variant

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
    for name in ("kernels", "variants"):
        ran = re.search(rf"^{name}: (.*)$", said, re.MULTILINE)[1].split()
        assert ran == sorted(getattr(CASES[case], name).split()), said


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


SIZES = """
BLOCKS_PER_SM BLOCK_THREADS CHOSEN CHUNK_BYTES CUT_BLOCK_KEYS CUT_FIXED_KEYS CUT_MIN_UNITS CUT_TILE_UNITS DOWN_BYTES
DOWN_FEATURES DOWN_ROWS DOWN_SLOTS DOWN_STAGES FEATURES FEATURE_WARPS HEAD_DIM INNER_WIDTH KEYS LATENT MAX_SHARES
MIN_TILES MODEL_WIDTH NUM_EXPERTS NUM_THREADS PASSES PLAN_BYTES RING_BYTES ROPE ROWS ROW_WIDTH SHARED_BYTES
SHARED_DOWN_ROWS SHARED_DOWN_STAGES SHARED_PICKS SHARED_UP_ROWS SHARED_UP_STAGES SLAB_INPUTS STAGES STREAMS SUMMANDS
TILE UNIT UP_BYTES UP_ROWS UP_SLOTS UP_STAGES
"""


def test_every_variant_of_the_code_stands_in_a_case():
    builds = all_builds()
    assert {name for build in builds for name, _ in build.defines} == {*SIZES.split(), *SWITCHES}, "sizes, or switches?"
    run = {name for case in CASES.values() for name in case.variants.split()}
    assert {variant(str(build)) for build in builds} <= run


def test_a_switch_makes_another_variant():
    assert variant("moe_many_rows.cu (DTYPE=2, TILE_EIGHTS=3)") == "moe_many_rows+DTYPE"
    assert variant("moe_many_rows.cu (DTYPE=1, TILE_EIGHTS=6)") == "moe_many_rows+DTYPE+TILE_EIGHTS"
    assert variant("moe_int4.cu (DTYPE=0, SHARED_WIDTH=64, WHOLE_DOWN=0)") == "moe_int4+SHARED_WIDTH"
    assert variant("router.cu") == "router"
