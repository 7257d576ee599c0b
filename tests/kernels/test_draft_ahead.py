"""draft_attention behind head_norm_rope: it reads the context while that one still makes its queries."""

from dataclasses import replace

import pytest
import torch

from kdlab.kernels.head_norm_rope import head_norm_rope
from tests.kernels.test_draft_attention import new_case


@pytest.mark.gpu
@pytest.mark.parametrize("starts", [(0, 3, 64), (1024, 40, 2000), (31, 32, 33), (262_144,)], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_an_old_context_is_read_while_the_kernel_ahead_makes_queries(starts, window):
    case = new_case(starts, dim=64, dtype=torch.bfloat16, device="cuda", window=window)
    heads = case.q.shape[2]
    cos, sin = (torch.rand(8, 32, device="cuda") for _ in range(2))
    ones, zero = (torch.full((64,), 1.0, dtype=torch.bfloat16, device="cuda"), torch.zeros_like(case.start))
    rows = torch.cat((case.q, case.k), dim=2)
    raw, other = rows.clone(), torch.randn_like(rows)

    def attend(**options):
        turned = head_norm_rope(raw, ones, ones, cos, sin, zero, num_queries=heads, eps=1e-5)
        q, k = turned.split((heads, turned.shape[2] - heads), dim=2)
        return replace(case, q=q, k=k).run("cuda", **options)

    want = attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            raw.copy_(other)
            attend(past_is_old=True)
            raw.copy_(rows)
            got = attend(past_is_old=True)
    for _ in range(5):
        graph.replay()
    assert torch.equal(got, want)
    raw.copy_(other)
    assert not torch.equal(attend(past_is_old=True), want)
