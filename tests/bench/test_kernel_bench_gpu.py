"""A short run of the kernel benchmark on a GPU: every op is checked, no arm is wrong, and what is cut is named."""

import pytest
import torch

from kdlab.bench import read_rows
from kdlab.bench.kernels import OPS, bench_kernels
from kdlab.kernels.builds import all_builds
from kdlab.kernels.jit import arch_of, compile_all
from tests.bench.test_kernel_bench import ops_cut
from tests.bench.test_recorded import KERNELS, assert_no_faster_than_the_card, ceilings_of


def slowed_by_others(rows):
    """How much less the card could do than in the recording, at least 1: others take their share meanwhile."""
    recorded = read_rows(KERNELS)
    if rows["gpu"].iloc[0] != recorded["gpu"].iloc[0]:
        return 1.0
    return max(1.0, (ceilings_of(recorded) / ceilings_of(rows)).max())


@pytest.mark.gpu
def test_a_short_run_checks_every_op_and_names_what_it_has_no_time_for():
    arch = arch_of(torch.device("cuda"))
    compile_all([(build, arch) for build in all_builds() if arch in build.archs], workers=4)
    found = bench_kernels(seconds=12.0, heads=[8])  # checks take 3 to 8 of them, and more beside others
    assert found.fault is None
    assert not [line for line in found.messages if "WRONG" in line]
    ops = found.rows.groupby("metric")["op"].agg(set)
    assert ops["relative_error"] == set(OPS)
    timed = ops.get("time_us", set()) - {"ceiling"}
    assert ops_cut(found.messages) == set(OPS) - timed
    if timed:
        assert_no_faster_than_the_card(found.rows, slowed_by_others(found.rows))
