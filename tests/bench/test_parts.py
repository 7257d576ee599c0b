"""Parts of stages that are timed by themselves: what they run, and over which layers."""

import contextlib
from dataclasses import replace

import pytest
import torch

from kdlab.bench.full_width import parts
from kdlab.bench.full_width.parts import part_work
from kdlab.bench.full_width.random_pair import random_pair
from kdlab.config import TargetConfig
from kdlab.kernels.stage import observed
from kdlab.model.layers import SwiGlu
from kdlab.model.ranks import Ranks
from kdlab.paths import DATA
from kdlab.study.step_cost import Step, round_parts

TINY = TargetConfig.load(DATA / "tiny-pair" / "target")


def watched(monkeypatch, config, tokens=5):
    """What a run of all parts does, as (stage, weights read, rows)."""
    pair = random_pair(config, None, ranks=Ranks.slice_of(0, 2, "tp"), device=torch.device("cpu"), dtype=torch.float32)
    seen, under_way = [], []
    swiglu, norm = SwiGlu.forward, parts.add_norm

    @contextlib.contextmanager
    def observe(name):
        under_way.append(name)
        yield
        under_way.pop()

    def feed_forward(self, x, ops="reference"):
        seen.append((*under_way, self.down.data_ptr(), len(x)))
        return swiglu(self, x, ops)

    def add_norm(x, update, weight, eps):
        seen.append((*under_way, weight.data_ptr(), len(x)))
        assert not torch.equal(x, update), "one tensor twice would be read once"
        return norm(x, update, weight, eps)

    monkeypatch.setattr(SwiGlu, "forward", feed_forward)
    monkeypatch.setattr(parts, "add_norm", add_norm)
    with observed(observe):
        part_work(pair.target, tokens)()
    return pair.target, seen


@pytest.mark.parametrize("layers", [2, 4])
def test_the_shared_expert_of_every_layer_with_experts_and_the_last_norm_are_run_alone(monkeypatch, layers):
    config = replace(TINY, num_hidden_layers=layers)
    target, seen = watched(monkeypatch, config)
    shared = [layer.mlp.shared for layer in target.layers if config.is_moe_layer(layer.attention.layer)]
    expected = [("final norm", target.norm.data_ptr(), 5)]
    expected += [("shared expert", one.down.data_ptr(), 5) for one in shared]
    assert seen == expected
    named = [part.name for _, part in round_parts(config, Step(5, 4.0, ranks=2))]
    assert list(dict.fromkeys(name for name, *_ in seen)) == named


def test_without_shared_experts_there_is_a_norm_alone(monkeypatch):
    _, seen = watched(monkeypatch, replace(TINY, n_shared_experts=0))
    assert [name for name, *_ in seen] == ["final norm"]
