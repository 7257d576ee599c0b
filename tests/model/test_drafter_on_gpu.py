"""The drafter through its kernels: as near to float64 as plain torch, without waiting, and the same out of a graph."""

import copy
from dataclasses import replace

import pytest
import torch

from kdlab.config import DrafterConfig
from kdlab.kernels.capture import capture
from kdlab.model.drafter import Drafter
from kdlab.paths import DATA

pytestmark = pytest.mark.gpu
LENGTHS = (0, 70, 17, 64)
MASKS = {"full": {}, "sliding": {"sliding": (7, None), "causal": (True, False)}}


def new_drafter(mask):
    """The tiny drafter with random weights and a mask of MASKS."""
    torch.manual_seed(0)
    drafter = Drafter(replace(DrafterConfig.load(DATA / "tiny-pair" / "drafter"), **MASKS[mask]))
    for part in drafter.views().values():
        part.view.normal_(1 if part.view.dim() == 1 else 0, 0.1)
    return drafter


def random_inputs(drafter, length, streams):
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(streams, length, drafter.fc.shape[1], generator=generator)
    return taps, torch.randn(streams, drafter.config.block_size, drafter.config.hidden_size, generator=generator)


def run(drafter, dtype, device, counts=LENGTHS):
    """Extend four streams by `counts` rows and draft behind them: in `dtype` on `device`, with NaN where nothing is."""
    drafter = copy.deepcopy(drafter).to(dtype).to(device)
    taps, block = (rows.to(dtype).to(device) for rows in random_inputs(drafter, 80, streams=4))
    for stream, count in enumerate(counts):
        taps[stream, count:] = torch.nan
    context = drafter.new_context(4, 100, device, dtype)
    context.keys.fill_(torch.nan)
    context.values.fill_(torch.nan)
    starts, ends = (torch.tensor(rows, device=device) for rows in ([0] * 4, counts))
    drafter.extend(context, taps, starts, ends)
    return drafter(block, ends, context)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_as_near_to_float64_as_plain_torch(dtype, mask):
    drafter = new_drafter(mask)
    exact, plain = run(drafter, torch.float64, "cpu"), run(drafter, dtype, "cpu")
    ours = run(drafter, dtype, "cuda").cpu()
    for stream in range(len(LENGTHS)):
        error, allowed = ((out[stream] - exact[stream]).norm() for out in (ours, plain))
        assert error <= 2 * allowed, f"stream {stream}: {error:.3g} against {allowed:.3g}"
        assert (run(drafter, dtype, "cuda", (1, 69, 16, 63)).cpu()[stream] - exact[stream]).norm() > 2 * allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nothing_waits_for_the_gpu(dtype):
    drafter = new_drafter("sliding").to(dtype).cuda()
    taps, block = (rows.to(dtype).cuda() for rows in random_inputs(drafter, 5, streams=3))
    context = drafter.new_context(3, 100, "cuda", dtype)
    start, count = (torch.tensor(rows, dtype=torch.int32, device="cuda") for rows in ((0, 0, 0), (5, 0, 3)))

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
        start.copy_(torch.tensor((5, 0, 3)))
        count.copy_(torch.tensor((4, 5, 0)))
        graph.replay()
        assert torch.equal(kept[-1], both())
