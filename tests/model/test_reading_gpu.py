"""Reading straight to a GPU: the same bytes as on the CPU, whole and by slices, experts packed."""

import pytest
import torch

import kdlab
from kdlab.model.ranks import Ranks
from kdlab.model.target import plan_target
from tests.model.synthetics import WIDE, write_pair

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("reading-gpu"), changes=WIDE)


@pytest.mark.parametrize(("size", "experts"), [(1, "tp"), (4, "tp"), (4, "ep")])
def test_the_bytes_are_those_of_the_files(folders, size, experts):
    for rank in range(size):
        planned = plan_target(
            folders[0], device="cuda", dtype=torch.bfloat16, ranks=Ranks.slice_of(rank, size, experts)
        )
        got, expected = planned.read("cuda").views(), planned.read("cpu").views()
        assert got.keys() == expected.keys()
        assert all(part.view.is_cuda and torch.equal(part.view.cpu(), expected[n].view) for n, part in got.items())
        assert any(name.endswith("weight_packed") for name in got)


def test_a_pair_on_the_gpu_holds_no_more_than_was_planned(folders):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    pair = kdlab.load_pair(*folders, device="cuda", dtype="bfloat16")
    weights = [*pair.target.parameters(), *pair.drafter.parameters()]
    held = sum(weight.nbytes for weight in weights)
    assert torch.cuda.memory_allocated() - before < held + 512 * len(weights)
