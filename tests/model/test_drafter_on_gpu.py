"""The drafter through its kernels: as near to float64 as plain torch, without waiting, and the same out of a graph."""

import copy

import pytest
import torch

from kdlab.kernels.capture import capture
from tests.model.drafters import SLIDING, at, random_inputs, random_pair

pytestmark = pytest.mark.gpu
LENGTHS = (0, 70, 17, 64)


def run(drafter, dtype, device, counts=LENGTHS):
    """Extend four streams by `counts` rows and draft behind them: in `dtype` on `device`, with NaN where nothing is."""
    drafter = copy.deepcopy(drafter).to(dtype).to(device)
    taps, block = (rows.to(dtype).to(device) for rows in random_inputs(drafter, 80, streams=4))
    for stream, count in enumerate(counts):
        taps[stream, count:] = torch.nan
    context = drafter.new_context(4, 100, device, dtype)
    context.keys.fill_(torch.nan)
    context.values.fill_(torch.nan)
    zeros, ends = at(0, 0, 0, 0).to(device), at(*counts).to(device)
    drafter.extend(context, taps, zeros, ends)
    return drafter(block, ends, context)


@pytest.mark.parametrize("changes", [{}, SLIDING | {"sliding_window": 7}], ids=["full", "sliding"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_as_near_to_float64_as_plain_torch(dtype, changes):
    _, drafter = random_pair(**changes)
    exact, plain = run(drafter, torch.float64, "cpu"), run(drafter, dtype, "cpu")
    ours = run(drafter, dtype, "cuda").cpu()
    for stream in range(len(LENGTHS)):
        error, allowed = ((out[stream] - exact[stream]).norm() for out in (ours, plain))
        assert error <= 2 * allowed, f"stream {stream}: {error:.3g} against {allowed:.3g}"
        assert (run(drafter, dtype, "cuda", (1, 70, 17, 63)).cpu()[3] - exact[3]).norm() > 2 * allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nothing_waits_for_the_gpu(dtype):
    _, drafter = random_pair(**SLIDING | {"sliding_window": 7})
    drafter = drafter.to(dtype).cuda()
    taps, block = (rows.to(dtype).cuda() for rows in random_inputs(drafter, 5, streams=3))
    context = drafter.new_context(3, 100, "cuda", dtype)
    start, count = at(0, 0, 0).int().cuda(), at(5, 0, 3).int().cuda()

    def both():
        drafter.extend(context, taps, start, count)
        return drafter(block, start + count, context)

    first = both()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)
    with torch.inference_mode():
        kept = []
        graph = capture([lambda: kept.append(both())])
        start.copy_(at(5, 0, 3))
        count.copy_(at(4, 5, 0))
        graph.replay()
        assert torch.equal(kept[-1], both())
