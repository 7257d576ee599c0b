"""The training forwards against the modules that decode: same weights, same numbers."""

import pytest
import torch

from kdlab.kernels.int4 import dequantize_int4
from kdlab.mini.batches import TokenStream
from kdlab.mini.draft_forward import draft_blocks, position_tables
from kdlab.mini.drafter_training import new_drafter
from kdlab.mini.int4_training import fake_quantize, packed
from kdlab.mini.shape import SMOKE, drafter_config, target_config
from kdlab.mini.target_forward import TargetForward, block
from kdlab.mini.target_training import balance, new_target
from kdlab.mini.writer import Openings, Writer, draw_openings
from kdlab.model.drafter import Drafter
from kdlab.model.target import Target


@pytest.fixture(scope="module")
def target() -> Target:
    made = new_target(target_config(SMOKE), seed=3, device="cpu")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("router.bias"):
                parameter.copy_(torch.linspace(-0.2, 0.2, len(parameter)))
            elif parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return made


def _decoded(target: Target, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count, length = tokens.shape
    triangle = torch.ones(length, length, dtype=torch.bool).tril().expand(count, -1, -1)
    positions = torch.arange(length).expand(count, -1)
    out = target(tokens, positions, None, torch.zeros(count, dtype=torch.long), triangle, taps=SMOKE.taps)
    assert out.taps is not None
    return target.head(out.hidden), out.taps


def test_training_forward_gives_the_logits_and_taps_of_the_target(target: Target) -> None:
    tokens = torch.randint(SMOKE.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    out = TargetForward(target, quantized=False, block=block)(tokens, SMOKE.taps)
    logits, taps = _decoded(target, tokens)
    assert torch.allclose(target.head(out.hidden), logits, atol=2e-5)
    assert torch.allclose(torch.cat(out.taps, dim=-1), taps, atol=2e-5)
    assert all(load.sum() == 2 * 40 * SMOKE.experts_per_token for load in out.loads)


def test_quantized_forward_differs_from_the_plain_one(target: Target) -> None:
    tokens = torch.randint(SMOKE.vocab_size, (1, 16))
    plain, quantized = (TargetForward(target, quantized=flag, block=block)(tokens).hidden for flag in (False, True))
    assert not torch.allclose(plain, quantized, atol=1e-4)


def test_fake_quantized_weight_is_what_the_stored_one_reads_as() -> None:
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(0), requires_grad=True)
    stored = packed(weight.detach())
    read = dequantize_int4(stored["weight_packed"], stored["weight_scale"], torch.float32)
    shown = fake_quantize(weight)
    assert torch.allclose(shown, read, atol=1e-6)
    shown.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_draft_blocks_agree_with_the_drafter(target: Target) -> None:
    drafter = new_drafter(Drafter(drafter_config(SMOKE, 8)), seed=5).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    taps = torch.randn(2, 30, drafter.fc.shape[1], generator=generator)
    start = torch.tensor([[1, 9, 20], [4, 4, 29]])
    blocks = torch.randn(2, 3, 8, SMOKE.hidden_size, generator=generator)
    many = draft_blocks(drafter, taps, blocks, start, position_tables(drafter, 30, start.device))
    for s in range(2):
        for a in range(3):
            context = drafter.new_context(1, 64, "cpu", torch.float32)
            drafter.extend(context, taps[s : s + 1], torch.tensor([0]), torch.tensor([30]))
            one = drafter(blocks[s, a][None], start[s, a][None], context)
            assert torch.allclose(many[s, a], one[0], atol=2e-5)


def test_writer_goes_on_greedily_as_the_target_does(target: Target) -> None:
    openings = Openings(torch.tensor([[5, 6, 7], [9, 8, 1]]), torch.tensor([3, 2]))
    writer = Writer(target, quantized=False, dtype=torch.float32)
    written = writer.write(openings, torch.zeros(2), 12, end=-1, generator=torch.Generator().manual_seed(0))
    tokens = written.tokens.long()
    assert tokens[0, :3].tolist() == [5, 6, 7]
    assert written.own.sum(1).tolist() == [9, 10]
    best = _decoded(target, tokens)[0].argmax(-1)
    assert torch.equal(best[:, :-1][written.own[:, 1:]], tokens[:, 1:][written.own[:, 1:]])


def test_writer_opens_another_document_behind_an_end(target: Target) -> None:
    openings = Openings(torch.tensor([[5, 6, 2], [9, 8, 2]]), torch.tensor([3, 3]))
    writer = Writer(target, quantized=False, dtype=torch.float32)
    written = writer.write(openings, torch.ones(1), 9, end=2, generator=torch.Generator().manual_seed(0))
    assert not written.own.any()  # each opening ends with the end token, so that only openings follow
    assert set(written.tokens[0].tolist()) <= {5, 6, 2, 9, 8}


def test_openings_stop_before_their_document_ends() -> None:
    tokens = torch.tensor([7, 7, 7, 0, 8, 8, 8, 8, 8, 8, 0]).numpy().astype("uint16")
    stream = TokenStream.of(tokens, eos=0, device="cpu")
    drawn = draw_openings(stream, 50, 2, 6, torch.Generator().manual_seed(0))
    for row, length in zip(drawn.tokens, drawn.lengths, strict=True):
        assert 0 not in row[:length]


def test_balance_lifts_idle_experts(target: Target) -> None:
    before = target.layers[1].mlp.router.bias.clone()
    loads = [torch.tensor([9.0] + [1.0] * (SMOKE.num_experts - 1))] * (SMOKE.num_layers - 1)
    balance(target, loads, 0.01)
    change = target.layers[1].mlp.router.bias - before
    assert change[0] < 0 < change[1]
