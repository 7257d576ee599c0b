"""A short run of the kernel benchmark on a GPU: every op is checked, no arm is wrong, and what is cut is named."""

import os
import time

import pytest
import torch

from kdlab import machine
from kdlab.bench.kernels import OPS, bench_kernels, kernel_table
from kdlab.kernels.builds import all_builds
from kdlab.kernels.jit import arch_of, compile_all
from tests.bench.test_kernel_bench import ops_cut


def is_shared():
    """Whether other processes use the GPU; where NVML does not tell, whether tests run side by side."""
    running = machine._ask_nvml(None, lambda nvml, gpu: nvml.nvmlDeviceGetComputeRunningProcesses(gpu))
    return len(running) > 1 if running else "PYTEST_XDIST_WORKER" in os.environ


@pytest.mark.gpu
def test_a_short_run_checks_every_op_and_times_them_where_the_gpu_is_its_own():
    arch = arch_of(torch.device("cuda"))
    jobs = [(build, arch) for build in all_builds() if arch in build.archs]
    compile_all(jobs, workers=4)  # or a cold cache takes the 12 s
    begin, shared = time.monotonic(), is_shared()
    found = bench_kernels(seconds=12.0, heads=[8])
    took, shared = time.monotonic() - begin, shared or is_shared()
    assert found.fault is None
    assert not [line for line in found.messages if "WRONG" in line]
    ops = found.rows.groupby("metric")["op"].agg(set)
    assert ops["relative_error"] == set(OPS)
    timed = ops.get("time_us", set()) - {"ceiling"}
    assert ops_cut(found.messages) == set(OPS) - timed
    if timed:
        table = kernel_table(found.rows)
        own = table[table["own"] & (table["mode"] == "graph")]
        assert (own["roofline"] < 1.05).all(), "faster than the card can be: what is timed is in a cache"
    if not shared:  # beside others, checks alone may take as long
        assert timed == set(OPS)
        assert took < 18.0
