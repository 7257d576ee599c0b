"""Kernels with a planted fault each, for compute-sanitizer to find: the broken twins of tests/kernels/sanitized.py."""

import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch

from kdlab.kernels import jit
from kdlab.paths import CSRC

TWIN = """
#include "named_barriers.cuh"
// Half of the block writes and the other half reads. FAULT 1: it reads before it waits. FAULT 2: a value too many.
extern "C" __global__ void __launch_bounds__(64) twin(int* out) {
  __shared__ int data[32];
  const int i = threadIdx.x % 32;
  if (threadIdx.x == 0) named_barrier_init(1, 64);
  __syncthreads();
  if (threadIdx.x < 32) {
    data[i] = i;
    named_barrier_arrive(1, 64);
  } else {
    if (FAULT != 1) named_barrier(1, 64);
    out[FAULT == 2 ? i + 1 : i] = data[31 - i];
    if (FAULT == 1) named_barrier(1, 64);
  }
}
"""


def twin(fault):
    """A kernel with one of these faults."""
    with tempfile.TemporaryDirectory() as folder:
        jit.build.CSRC = Path(folder)
        for name in ("named_barriers.cuh", "common.cuh"):
            shutil.copy(CSRC / name, folder)
        (jit.build.CSRC / "twin.cu").write_text(TWIN)
        out = torch.zeros(32, dtype=torch.int32).cuda()
        jit.kernel(jit.Build("twin.cu", (("FAULT", fault),)), "twin", out.device).launch(1, 64, out)
        torch.cuda.synchronize()


TWINS = {
    "race": ("racecheck", partial(twin, 1), "Race reported between"),
    "overflow": ("memcheck", partial(twin, 2), "Invalid __global__ write of size 4 bytes"),
}
"""Faults by name: the tool that must find each, what runs, and what the tool says."""
