"""norm_rope behind W_UK: it runs beside that product, whose kernel lets it start once q_b's has ended."""

import pytest
import torch

from kdlab.kernels.norm_rope import norm_rope
from kdlab.kernels.skinny_linear import skinny_linear, skinny_matmul
from tests.kernels.test_norm_rope import EPS, new_case

ROWS, HEADS, NOPE, LATENT, ROPE, HIDDEN = 9, 8, 128, 512, 64, 7168


class Layer:
    """What a layer does before its attention, with inputs and weights of its own."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.case = new_case(torch.bfloat16, (62, 0), (ROWS, ROWS), ROWS, HEADS).to("cuda")
        self.x = self.randn(2 * ROWS, HIDDEN)
        self.q_and_kv = self.randn(HEADS * (NOPE + ROPE) + LATENT + ROPE, HIDDEN)
        self.key_up = self.randn(HEADS, NOPE, LATENT)
        self.case.q.zero_()

    def randn(self, *shape):
        return (torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).bfloat16()

    def run(self, *, key_up=True, **options):
        """Both products, where `key_up` the one ahead of norm_rope, and norm_rope; returns a copy of what it wrote."""
        rows = skinny_linear(self.x, self.q_and_kv)
        q, kv = rows.unflatten(0, (2, ROWS)).split([HEADS * (NOPE + ROPE), LATENT + ROPE], dim=-1)
        q_nope, q_rope = q.unflatten(-1, (HEADS, -1)).split([NOPE, ROPE], dim=-1)
        into = self.case.q[..., :LATENT].flatten(0, 1).transpose(0, 1)
        if key_up:
            skinny_matmul(q_nope.flatten(0, 1).transpose(0, 1), self.key_up, out=into)
        norm_rope(*self.case._replace(kv=kv, q_rope=q_rope), eps=EPS, interleaved=True, **options)
        return self.case.q.clone(), self.case.pages.nan_to_num(7)


@pytest.mark.gpu
@pytest.mark.parametrize("behind_key_up", [True, False])
def test_old_inputs_are_read_beside_the_kernel_ahead(behind_key_up):
    layers = [Layer(seed) for seed in (0, 1)]
    want = [layer.run(key_up=behind_key_up) for layer in layers]
    for layer in layers:
        layer.case.pages.fill_(torch.nan)
        layer.case.q.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # each finds what the other layer left in the memory of `rows`
            got = [layer.run(key_up=behind_key_up, inputs_are_old=True) for layer in layers]
    for _ in range(5):
        graph.replay()
    same = all(torch.equal(*pair) for one, two in zip(got, want, strict=True) for pair in zip(one, two, strict=True))
    # Right behind the product that makes its inputs it reads what was there before.
    assert same == behind_key_up
