"""Rope tables against the facts and transformers, rotations against the formula."""

import pytest
import torch
from torch.testing import assert_close
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kdlab.config import RopeConfig
from kdlab.kernels.rope import apply_rope, inverse_frequencies, rope_tables, yarn_range

TARGET = RopeConfig(64, 5e4, 64.0, 4096, mscale_all_dim=1.0)
DRAFTER = RopeConfig(128, 5e4, 64.0, 4096)
PLAIN = RopeConfig(16, 1e4)


@pytest.mark.parametrize(
    ("rope", "ends", "pairs", "values"),
    [
        (TARGET, (8, 20), [8, 9, 19, 20, 31], [0.0668740, 0.0437767, 1.58375e-4, 1.80702e-5, 4.38221e-7]),
        (DRAFTER, (17, 39), [17, 18, 38, 39, 63], [0.0564724, 0.0455548, 9.79045e-5, 2.13986e-5, 3.70059e-7]),
    ],
)
def test_yarn_numbers_of_the_facts(rope, ends, pairs, values):
    found = inverse_frequencies(rope)
    assert yarn_range(rope) == ends
    assert found[0] == 1
    assert_close(found[pairs], torch.tensor(values, dtype=torch.float64), rtol=5e-6, atol=0)


@pytest.mark.parametrize("factor", [1.0, 8.0, 64.0])
@pytest.mark.parametrize("truncate", [True, False])
def test_frequencies_and_amplitude_equal_transformers(factor, truncate):
    values = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": factor,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
        "truncate": truncate,
    }
    config = DeepseekV3Config(qk_rope_head_dim=16, rope_parameters=values)
    expected, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config)
    rope = RopeConfig.from_dict({"rope_parameters": values}, 16)
    assert_close(inverse_frequencies(rope).float(), expected, rtol=1e-5, atol=0)
    assert rope.amplitude == pytest.approx(amplitude)


def test_tables_stay_exact_at_the_last_position():
    cos, sin = rope_tables(torch.tensor([262143]), TARGET)
    angle = 262143 * inverse_frequencies(TARGET)
    assert cos.dtype == sin.dtype == torch.float32
    assert_close(cos[0].double(), angle.cos(), rtol=0, atol=1e-7)
    assert_close(sin[0].double(), angle.sin(), rtol=0, atol=1e-7)
    in_float32 = (262143 * inverse_frequencies(TARGET).float()).cos()
    assert (in_float32 - cos[0]).abs().max() > 1e-4


def test_amplitude_multiplies_both_tables():
    plain, loud = (rope_tables(torch.arange(5), RopeConfig(16, 1e4, amplitude=a)) for a in (1.0, 1.5))
    assert_close(loud[0], 1.5 * plain[0])
    assert_close(loud[1], 1.5 * plain[1])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rotation_equals_the_formula_pair_by_pair(interleaved, dtype):
    x = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    cos, sin = rope_tables(torch.tensor([0, 3, 70]), PLAIN)
    out = apply_rope(x, cos[:, None], sin[:, None], interleaved)
    expected = torch.empty_like(x, dtype=torch.float64)
    for i in range(8):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 8)
        for row in range(3):
            c, s = cos[row, i].double(), sin[row, i].double()
            expected[row, :, a] = x[row, :, a].double() * c - x[row, :, b].double() * s
            expected[row, :, b] = x[row, :, b].double() * c + x[row, :, a].double() * s
    assert out.dtype == dtype
    assert_close(out.double(), expected, rtol=0, atol={torch.bfloat16: 2e-2}.get(dtype, 1e-6))
    assert_close(out[0], x[0], rtol=0, atol=0)


def test_the_layouts_differ():
    x, (cos, sin) = torch.arange(16.0), rope_tables(torch.tensor(3), PLAIN)
    assert (apply_rope(x, cos, sin, True) - apply_rope(x, cos, sin, False)).abs().max() > 1


@pytest.mark.parametrize("interleaved", [True, False])
def test_scores_depend_on_the_distance_only(interleaved):
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 64, generator=generator, dtype=torch.float64)

    def score(i, j):
        tables = [rope_tables(torch.tensor(p), TARGET) for p in (i, j)]
        return apply_rope(q, *tables[0], interleaved) @ apply_rope(k, *tables[1], interleaved)

    assert_close(score(7, 3), score(1007, 1003), rtol=0, atol=1e-5)
    assert (score(7, 3) - score(7, 4)).abs() > 1e-3
