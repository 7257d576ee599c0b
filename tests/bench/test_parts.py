"""Parts of stages that are timed by themselves: what they run, over which layers, and where they are told."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from kdlab.bench.full_width import parts
from kdlab.bench.full_width.parts import part_work
from kdlab.bench.full_width.point import Point
from kdlab.bench.full_width.random_pair import random_pair
from kdlab.bench.full_width.suite import _alone, bench_round
from kdlab.bench.full_width.table import part_table, point_table, stage_table
from kdlab.config import TargetConfig
from kdlab.kernels.stage import observed
from kdlab.model.layers import SwiGlu
from kdlab.model.ranks import Ranks
from kdlab.paths import DATA
from kdlab.study.step_cost import Step, round_parts
from tests.bench.samples import made_up_rows

ALONE = ("stage", "stage floor", "part", "part floor")
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


def test_a_part_is_told_with_its_stage_and_a_floor_of_its_own():
    found = SimpleNamespace(
        step=Step(5, 4.0, ranks=2), stages={"experts": [3.0], "other": [1.0]}, parts={"shared expert": [2.0]}
    )
    *stages, (metric, words, samples, floor) = _alone(TINY, found, {"experts": 1.0}, {"read": 4.0, "matrix": 700.0})
    assert stages == [("stage", {"stage": "experts"}, [3.0], 1.0), ("stage", {"stage": "other"}, [1.0], None)]
    assert (metric, words, samples) == ("part", {"stage": "experts", "part": "shared expert"}, [2.0])
    assert floor > 0


def test_parts_stand_beside_their_stages_and_in_no_sum():
    rows, before = made_up_rows({8: 200.0}), made_up_rows({8: 200.0}, parts=False)
    (part,) = part_table(rows).to_dict("records")
    assert (part["part"], part["stage"], part["rows"]) == ("shared expert", "experts", 8)
    assert [part[name] for name in ("us", "floor_us", "over_us")] == pytest.approx([20.0, 5.0, 15.0])
    assert part_table(before).empty
    pd.testing.assert_frame_equal(point_table(rows), point_table(before))
    pd.testing.assert_frame_equal(stage_table(rows), stage_table(before))
    counted = rows.assign(metric=rows["metric"].replace("part", "stage"))
    assert point_table(counted)["stages_us"].item() == pytest.approx(220.0), "as a stage it would count twice"


def assert_parts_are_less_than_their_stages(rows, num_points):
    parts = part_table(rows)
    assert set(parts["part"] + " of " + parts["stage"]) == {"final norm of norms", "shared expert of experts"}
    assert len(parts) == 2 * num_points
    inside = parts.merge(stage_table(rows), on=["rows", "stage"], suffixes=("", "_of_stage"))
    assert (inside["us"] > 0.0).all()
    assert (inside["us"] < inside["us_of_stage"]).all()


@pytest.mark.gpu
def test_whole_layers_are_measured_on_one_gpu_without_collectives():
    found = bench_round(ranks=1, experts="tp", layers=2, chosen=[(Point(9, 1, 64, 0.8), True)])
    assert found.messages == ()
    rows = found.rows
    assert set(rows["metric"]) == {"round", "floor", "loop", "row", "collectives", *ALONE}
    (point,) = point_table(rows).to_dict("records")
    assert (point["ranks"], point["layers"], point["collectives_us"]) == (1, 2, 0.0)
    assert point["floor_us"] < point["us"]
    assert_parts_are_less_than_their_stages(rows, num_points=1)
