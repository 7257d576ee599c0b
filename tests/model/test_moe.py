"""The router against ten lines of Python, and the whole layer against transformers."""

import pytest
import torch
from torch.testing import assert_close

from kdlab.config import TargetConfig
from kdlab.model.moe import MixtureOfExperts, Router
from tests.model.targets import SMALL, reference_model, yarn


def config(**changes):
    return TargetConfig.from_dict(SMALL | {"hidden_act": "silu", "rope_parameters": yarn(8)} | changes)


def router(settings, dtype=torch.float64):
    made = Router(settings, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in (made.gate, made.bias):
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return made


def oracle(row, made, settings):
    """Return expert -> weight of one row, in plain Python numbers."""
    scores = [1 / (1 + float((-(row @ gate)).exp())) for gate in made.gate]
    choice = [score + float(bias) for score, bias in zip(scores, made.bias, strict=True)]
    size = len(choice) // settings.n_group
    groups = [range(g * size, (g + 1) * size) for g in range(settings.n_group)]
    groups.sort(key=lambda group: -sum(sorted(choice[e] for e in group)[-2:]))
    open_experts = [e for group in groups[: settings.topk_group] for e in group]
    chosen = sorted(open_experts, key=lambda e: -choice[e])[: settings.num_experts_per_tok]
    total = sum(scores[e] for e in chosen) if settings.norm_topk_prob else 1.0
    return {e: scores[e] / total * settings.routed_scaling_factor for e in chosen}


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_group": 4, "topk_group": 2}, {"n_group": 2, "topk_group": 1}, {"norm_topk_prob": False}],
)
def test_router_equals_the_oracle(changes):
    settings = config(**changes)
    made = router(settings)
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expert_ids, weights = made(x)
    for row, ids, got in zip(x, expert_ids.tolist(), weights.tolist(), strict=True):
        assert dict(zip(ids, got, strict=True)) == pytest.approx(oracle(row, made, settings), rel=1e-9)


def test_the_bias_changes_the_choice_and_never_the_formula_of_the_weights():
    settings = config()
    made = router(settings)
    x = torch.randn(30, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before, _ = made(x)
    made.bias[5] = 10.0
    after, weights = made(x)
    assert not (before == 5).any(-1).all()
    assert (after == 5).any(-1).all()
    scores = (x @ made.gate.T).sigmoid().gather(1, after.long())
    assert_close(weights, scores / scores.sum(-1, keepdim=True) * 2.5)
    biased = ((x @ made.gate.T).sigmoid() + made.bias).gather(1, after.long())
    assert (weights - biased / biased.sum(-1, keepdim=True) * 2.5).abs().max() > 0.1


def test_bfloat16_rows_are_routed_in_float32():
    made, wide = router(config(), torch.bfloat16), router(config(), torch.float32)
    assert made.bias.dtype == torch.float32
    wide.gate.copy_(made.gate)
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    expert_ids, weights = made(x)
    assert weights.dtype == torch.float32
    in_bfloat16 = (x @ made.gate.T).sigmoid().float()
    assert not torch.equal(in_bfloat16.gather(1, expert_ids.long()), wide(x.float())[1])
    assert torch.equal(expert_ids, wide(x.float())[0])
    assert torch.equal(weights, wide(x.float())[1])


def test_rows_that_are_not_in_use_ask_for_no_expert():
    made, x = router(config()), torch.randn(5, 48, dtype=torch.float64)
    used = torch.tensor([True, False, True, True, False])
    expert_ids, weights = made(x, used)
    assert torch.equal(expert_ids[used], made(x)[0][used])
    assert (expert_ids[~used] == -1).all()
    assert (weights[~used] == 0).all()


@pytest.mark.parametrize("shared", [1, 2])
def test_layer_equals_transformers(shared):
    layer = reference_model(n_shared_experts=shared).model.layers[1].mlp
    ours = MixtureOfExperts(config(n_shared_experts=shared), dtype=torch.float32, device="cpu", packed=False)
    source = layer.state_dict()
    gate_up = source.pop("experts.gate_up_proj")
    down = source.pop("experts.down_proj")
    for e in range(8):
        gate, up = gate_up[e].chunk(2)
        source |= {f"experts.{e}.gate_proj.weight": gate, f"experts.{e}.up_proj.weight": up}
        source[f"experts.{e}.down_proj.weight"] = down[e]
    assert source.keys() == ours.views().keys()
    for name, part in ours.views().items():
        part.view.copy_(source[name])
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(ours(x.flatten(0, 1))[0].view_as(x), layer(x), atol=1e-5, rtol=1e-5)


def test_without_a_shared_expert():
    made = MixtureOfExperts(config(n_shared_experts=0), dtype=torch.float32, device="cpu", packed=False)
    assert made.shared is None
    assert not any("shared" in name for name in made.views())
