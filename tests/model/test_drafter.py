"""The DFlash drafter against the published package on random weights, and what its forward must depend on."""

import pytest
import torch
from dflash.model import DFlashDraftModel
from transformers import DynamicCache

from kdlab.model.drafter import Drafter, load_drafter
from tests.model.drafters import SLIDING, TINY, YARN, at, draft, random_inputs, random_pair

CASES = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1, "head_dim": 16},
    "wide": {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 3},
    "yarn": {"rope_parameters": YARN},
    "block-4": {"block_size": 4},
    "three-taps": {"dflash_config": {"mask_token_id": 127, "target_layer_ids": [3, 0, 1]}},
    "sliding": SLIDING | {"sliding_window": 7},
    "sliding-short": SLIDING | {"sliding_window": 3},
    "sliding-two-way": SLIDING | {"sliding_window": 5, "is_causal": False},
    "causal": {"is_causal": True},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("length", [1, 6, 80])
def test_matches_the_published_package(changes, length):
    theirs, ours = random_pair(**changes)
    taps, block = random_inputs(ours, length)
    positions = torch.arange(length + ours.config.block_size)[None]
    want = theirs(position_ids=positions, noise_embedding=block, target_hidden=taps)
    torch.testing.assert_close(draft(ours, taps, block), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", [CASES["gqa"], CASES["yarn"], CASES["sliding"]], ids=["gqa", "yarn", "sliding"])
def test_rounds_match_the_published_package_with_its_cache(changes):
    theirs, ours = random_pair(**changes)
    taps, _ = random_inputs(ours, 40)
    context, cache, start = ours.new_context(1, 64, "cpu", torch.float32), DynamicCache(), 0
    for count in (9, 1, 4, 8, 3):
        new = taps[:, start : start + count]
        ours.extend(context, new, at(start), at(count))
        positions = torch.arange(start, start + count + ours.config.block_size)[None]
        start += count
        _, block = random_inputs(ours, 1, seed=start)
        want = theirs(
            position_ids=positions, noise_embedding=block, target_hidden=new, past_key_values=cache, use_cache=True
        )
        cache.crop(-ours.config.block_size)
        torch.testing.assert_close(ours(block, at(start), context), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(draft(ours, taps[:, :start], block), want, atol=1e-5, rtol=1e-5)


def test_the_golden_drafter_loads_as_the_package_loads_it():
    theirs = DFlashDraftModel.from_pretrained(TINY).eval()
    ours = load_drafter(TINY, device="cpu", dtype=torch.float32)
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert (ours.config.block_size, ours.config.mask_token_id, ours.config.target_layer_ids) == (8, 127, (0, 2))
    taps, block = random_inputs(ours, 30)
    with torch.no_grad():
        want = theirs(position_ids=torch.arange(38)[None], noise_embedding=block, target_hidden=taps)
    torch.testing.assert_close(draft(ours, taps, block), want, atol=1e-5, rtol=1e-5)


def test_the_first_slot_must_hold_the_anchor():
    _, ours = random_pair()
    taps, block = random_inputs(ours, 20)
    block[:, 1:] = block[:, 1:2]
    all_masks = block[:, 1:2].expand_as(block)
    anchored, broken = draft(ours, taps, block), draft(ours, taps, all_masks)
    assert (anchored[:, 1:] - broken[:, 1:]).abs().amax(-1).min() > 1e-3  # every drafted slot saw the anchor


def test_tap_order_matters():
    _, ours = random_pair()
    taps, block = random_inputs(ours, 12)
    swapped = torch.cat(taps.chunk(2, dim=-1)[::-1], dim=-1)
    assert (draft(ours, taps, block) - draft(ours, swapped, block)).abs().max() > 1e-3


def test_positions_are_absolute():
    theirs, ours = random_pair(rope_parameters=YARN)
    taps, block = random_inputs(ours, 12)
    context = ours.new_context(1, 64, "cpu", torch.float32)
    ours.extend(context, torch.zeros_like(taps), at(0), at(12))
    ours.extend(context, taps, at(12), at(12))
    keys = context.keys[:, 0, 12:24]
    fresh = ours.new_context(1, 64, "cpu", torch.float32)
    ours.extend(fresh, taps, at(0), at(12))
    assert (keys - fresh.keys[:, 0, :12]).abs().max() > 1e-2  # rotated to where they stand
    torch.testing.assert_close(context.values[:, 0, 12:24], fresh.values[:, 0, :12])
    everything = torch.cat((torch.zeros_like(taps), taps), dim=1)
    want = theirs(position_ids=torch.arange(32)[None], noise_embedding=block, target_hidden=everything)
    torch.testing.assert_close(ours(block, at(24), context), want, atol=1e-5, rtol=1e-5)


def test_gradients_flow_and_match_the_published_package():
    theirs, ours = random_pair()
    taps, block = random_inputs(ours, 9)
    theirs.requires_grad_()
    ours.requires_grad_()
    theirs(position_ids=torch.arange(17)[None], noise_embedding=block, target_hidden=taps).square().sum().backward()
    draft(ours, taps, block).square().sum().backward()
    torch.testing.assert_close(ours.fc.grad, theirs.fc.weight.grad, atol=1e-3, rtol=1e-3)
    projections = ("q_proj", "k_proj", "v_proj")
    want = torch.cat([getattr(theirs.layers[0].self_attn, name).weight.grad for name in projections])
    torch.testing.assert_close(ours.heads.qkv.grad[0], want, atol=1e-3, rtol=1e-3)


def test_bfloat16_is_as_close_to_float64_as_the_published_package():
    theirs, ours = random_pair()
    taps, block = random_inputs(ours, 40)
    positions = torch.arange(48)[None]
    low = theirs.to(torch.bfloat16)(
        position_ids=positions, noise_embedding=block.bfloat16(), target_hidden=taps.bfloat16()
    )
    exact = Drafter(ours.config, dtype=torch.float64)
    half = Drafter(ours.config, dtype=torch.bfloat16)
    for name, part in ours.views().items():
        half.views()[name].view.copy_(part.view)
        exact.views()[name].view.copy_(half.views()[name].view)
    want = draft(exact, taps.bfloat16().double(), block.bfloat16().double())
    got = draft(half, taps.bfloat16(), block.bfloat16())
    assert got.dtype == torch.bfloat16
    assert (got - want).norm() <= 1.2 * (low - want).norm()


def test_the_amplitude_scales_queries_and_keys():
    theirs, ours = random_pair()
    loud = Drafter(ours.config, rope_amplitude=1.25)
    for name, part in ours.views().items():
        loud.views()[name].view.copy_(part.view)
    for layer in theirs.layers:
        layer.self_attn.scaling *= 1.25**2
    taps, block = random_inputs(ours, 9)
    want = theirs(position_ids=torch.arange(17)[None], noise_embedding=block, target_hidden=taps)
    torch.testing.assert_close(draft(loud, taps, block), want, atol=1e-5, rtol=1e-5)
