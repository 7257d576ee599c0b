"""moe_int4: blocks that share units of work: who has what, the sums that one hands to the next, and that all end."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from kdlab.kernels import counters, jit
from kdlab.kernels import moe_int4 as module
from kdlab.kernels.moe_builds import rows_build
from kdlab.kernels.moe_int4 import moe_int4
from kdlab.paths import CSRC, REPOSITORY
from tests.kernels.moe_cases import BF16, F32, assert_right, new_case

gpu = pytest.mark.gpu
CASES = [(33, 2048, BF16, BF16), (70, 1024, BF16, BF16), (33, 1536, BF16, None), (33, 1024, F32, BF16)]
SHARES = """
#include "moe_shares.cuh"
template <int N>
struct Units {
  static constexpr int SLABS = N;
};
extern "C" __global__ void shares(i64* out, i64 units, i64 others, i64 eighths) {
  const Share alike = equal_share<Units<1>>(others), rest = rest_share<Units<UNIT_SLABS>>(units, others, eighths);
  const i64 all[5] = {alike.first, alike.end, rest.first, rest.end, rest.next};
  for (int i = 0; i < 5; ++i) out[blockIdx.x * 5 + i] = all[i];
}
"""


def assert_each_slab_has_its_block(shares, units, others, slabs):
    """Look at [blocks, 5]: first and end of the others, first and end slab of the rest, and who goes on."""
    assert [n for row in shares for n in range(*row[:2])] == list(range(others))
    at, goes_on = 0, None
    for block, (_, _, first, end, following) in enumerate(shares):
        if first >= end:
            continue
        assert first == at
        assert (goes_on == block) == (first % slabs > 0)  # waits for sums of a lower block, or for none
        goes_on = following if end % slabs else None
        assert goes_on is None or goes_on > block
        at = end
    assert at == units * slabs
    assert goes_on is None


@gpu
@pytest.mark.parametrize("slabs", [1, 4, 14])
def test_each_slab_has_one_block_and_each_cut_unit_one_that_goes_on(slabs, csrc):
    shutil.copy(CSRC / "moe_shares.cuh", csrc)
    (csrc / "shares.cu").write_text(SHARES)
    shares_of = jit.kernel(jit.Build("shares.cu", (("UNIT_SLABS", slabs),)), "shares", torch.device("cuda", 0))
    for blocks in (6, 132, 264):
        for units in (0, 1, 8, 131, 132, 136, 216, 263, 400):
            for others in (0, 32, 96, 256, 300):
                for eighths in (6, 94):
                    out = torch.full((blocks, 5), -1, dtype=torch.int64, device="cuda")
                    shares_of.launch(blocks, 1, out, *map(np.int64, (units, others, eighths)))
                    shares = out.tolist()
                    assert_each_slab_has_its_block(shares, units, others, slabs)
                    whole = [block for block, row in enumerate(shares) if row[3] - row[2] == slabs]
                    assert 2 * units >= blocks or whole == list(range(blocks - units, blocks))
    shares[-1][3] -= 1
    with pytest.raises(AssertionError):
        assert_each_slab_has_its_block(shares, units, others, slabs)


@gpu
@pytest.mark.parametrize(("num_rows", "width", "dtype", "scale"), CASES)
def test_a_row_has_the_same_bits_wherever_its_units_are_cut(num_rows, width, dtype, scale):
    case = new_case(num_rows, width=width, inner=512, dtype=dtype, scale=scale, device="cuda")
    out = moe_int4(**case)
    assert_right(case, out)
    for some in (slice(0, 5), slice(7, 24)):  # other units, and other shares of them
        few = {name: case[name][some] for name in ("x", "expert_ids", "weights")}
        assert torch.equal(moe_int4(**(case | few)), out[some])
    assert counters._rings
    assert not any(ring.any() for ring, _ in counters._rings.values())
    later = case["x"].clone()
    later[:, : width // 2] = 0  # as if what a block hands over, sums of the first slabs, got lost
    with pytest.raises(AssertionError):
        assert_right(case, moe_int4(**(case | {"x": later})))


def on_half_the_places():
    """A block has a multiprocessor to itself, so that half of a launch's blocks begin when others have ended."""
    case = new_case(33, width=2048, inner=512, device="cuda")
    out = moe_int4(**case)
    build = rows_build(BF16, BF16, 2048, 512, 24)
    wide = replace(build, shared_bytes=tuple((name, 2 * size) for name, size in build.shared_bytes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "moe_path", lambda *_, **__: ("rows", (wide,)))
        assert torch.equal(moe_int4(**case), out)


def side_by_side():
    """Three streams run experts at once, as they come and as branches of a graph, while others hold some places."""
    cases = [new_case(33, width=2048, inner=512, seed=seed, device="cuda") for seed in range(3)]
    alone = [moe_int4(**case) for case in cases]
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1, -2)]
    matrix = torch.ones(3072, 3072, device="cuda")

    def at_once():
        this, outs = torch.cuda.current_stream(), []
        for stream, case in zip(streams, cases, strict=True):
            stream.wait_stream(this)
            with torch.cuda.stream(stream):
                outs.append([moe_int4(**case) for _ in range(4)])
        matrix @ matrix
        for stream in streams:
            this.wait_stream(stream)
        return outs

    outs = at_once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = at_once()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        for found in (outs, captured):
            assert all(torch.equal(one, right) for some, right in zip(found, alone, strict=True) for one in some)
        outs = at_once()


@gpu
def test_a_launch_ends_wherever_its_blocks_begin_in_order():
    """In a process of its own: what waits for ever would take the GPU along."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("two of these blocks on a multiprocessor, or one with twice the shared memory")
    code = "import tests.kernels.test_moe_shares as t\nt.on_half_the_places()\nt.side_by_side()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)
