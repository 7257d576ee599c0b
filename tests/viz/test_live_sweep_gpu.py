"""The live sweep on a GPU: captured rounds from a thread of their own, and a GPU that is out of memory."""

import pytest
import torch

import kdlab
from kdlab.study import check_live, sweep, sweep_live
from kdlab.viz import LiveSweep
from tests.pairs import golden_prompts

MIB = 1 << 20


@pytest.mark.gpu
def test_captured_rounds_run_in_the_worker_and_are_what_was_recorded():
    pair = kdlab.load_pair("tiny", device="cuda")
    field = kdlab.record(pair, golden_prompts(), top_k=128, max_new_tokens=24)
    rounds = sweep_live(pair, golden_prompts(), [("ddtree", 7)], max_new_tokens=24)
    live = LiveSweep(rounds, len(golden_prompts())).wait()
    assert check_live(live, sweep(field, [7]))["equal_prompts"].tolist() == [len(golden_prompts())]


@pytest.fixture
def small_gpu():
    """Let this process have a small part of the GPU, so that running out of memory disturbs nobody else."""
    torch.cuda.set_per_process_memory_fraction(0.01)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_out_of_memory_is_an_error_and_the_memory_comes_back(small_gpu):
    def greedy():
        held = []
        while True:
            held.append(torch.empty(100 * MIB, dtype=torch.uint8, device="cuda"))
            yield None

    before = torch.cuda.memory_allocated()
    live = LiveSweep(greedy(), 1)
    with pytest.raises(torch.OutOfMemoryError):
        live.wait()
    assert "failed after 0 of 1 turns: OutOfMemoryError" in live.words.value
    assert torch.cuda.memory_allocated() <= before + MIB  # although the error is still held
    assert float(torch.ones(8, device="cuda").sum()) == 8.0
