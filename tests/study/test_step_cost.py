"""Cost of a K2.6 round: published weight bytes, what ranks share, and what each argument moves."""

from dataclasses import replace

import pytest

from kdlab.errors import ArgumentError
from kdlab.study.experts import distinct_experts
from kdlab.study.step_cost import Step, all_reduces, rank_weights, round_parts, round_stages
from tests.study.k26 import DRAFTER, EXPERTS, TARGET

H200 = {"bytes_per_s": 4.2e12, "flops_per_s": 7.8e14, "launch_us": 1.1}


def step(rows, g=1.0, **changes):
    return Step(rows, distinct_experts(rows, g=g, streams=changes.get("streams", 1), **EXPERTS), **changes)


def stages(rows, drafter=DRAFTER, **changes):
    return {stage.name: stage for stage in round_stages(TARGET, drafter, step(rows, **changes))}


def total(found):
    return sum(stage.cost.bytes for stage in found.values())


# GiB that one forward reads, published for independent routing; activations add the tolerance.
@pytest.mark.parametrize(("rows", "gib"), [(1, 30.7), (8, 102.0), (16, 171.7), (33, 285.9), (65, 415.9)])
def test_a_forward_reads_the_published_bytes(rows, gib):
    assert total(stages(rows, drafter=None, context=0)) / 2**30 == pytest.approx(gib, rel=0.006)


# Of 31.69 billion activated parameters, published, and of absorbed attention for each key.
@pytest.mark.parametrize(("rows", "context"), [(1, 0), (1, 8192), (33, 2048)])
def test_a_token_takes_the_published_operations(rows, context):
    flops = sum(stage.cost.flops for stage in stages(rows, drafter=None, context=context).values())
    attention = 61 * 64 * 2 * (576 + 512) * (context + (rows + 1) / 2)
    assert flops / rows == pytest.approx(2 * 31.69e9 + attention, rel=5e-4)


def test_the_drafter_reads_its_published_values_and_its_operations_are_two_of_each():
    found = stages(9, context=0)
    twice = 6 * 2 * 1024 * 7168  # keys' and values' weights, for the block and for the context
    read = found["draft layers"].cost.bytes + found["draft context"].cost.bytes
    assert read == pytest.approx(2 * (3_479_277_056 + twice), rel=0.003)
    per_layer = 7168 * (64 + 16) * 128 + 64 * 128 * 7168 + 3 * 7168 * 18432
    assert found["draft layers"].cost.flops == pytest.approx(2 * 8 * 6 * per_layer, rel=1e-3)


def test_what_every_rank_reads_alike_is_counted_stage_by_stage():
    whole = stages(33, drafter=None)
    expected = {
        "norms": whole["norms"].cost.bytes,
        "q_a and kv_a": 61 * 2 * (2112 * 7168 + 33 * (2112 + 7168)),
        "attention": 61 * 2 * 576 * (1024 + 33),
        "router": 60 * (2 * 7168 * (384 + 33) + 8 * 33 * 8),
        "commit": whole["commit"].cost.bytes,
    }
    for ranks in (1, 8):
        found = {name: stage.replicated for name, stage in stages(33, drafter=None, ranks=ranks).items()}
        assert {name: nbytes for name, nbytes in found.items() if nbytes} == expected


def test_eight_ranks_share_all_but_the_replicated_bytes():
    whole, rank = stages(33), stages(33, ranks=8)
    assert rank["q_a and kv_a"].cost == whole["q_a and kv_a"].cost
    assert rank["q_a and kv_a"].replicated == rank["q_a and kv_a"].cost.bytes
    for name in ("experts", "lm_head", "o_proj"):
        assert rank[name].cost.bytes == pytest.approx(whole[name].cost.bytes / 8, rel=0.06)
    shared = total(whole) - sum(stage.replicated for stage in whole.values())
    kept = sum(stage.replicated for stage in rank.values())
    assert total(rank) == pytest.approx(shared / 8 + kept, rel=0.02)


@pytest.mark.parametrize(("ranks", "experts"), [(1, "tp"), (8, "tp"), (8, "ep")])
def test_parts_of_stages_are_the_last_norm_and_the_shared_expert_over_all_layers(ranks, experts):
    found = {part.name: (inside, part) for inside, part in round_parts(TARGET, step(33, ranks=ranks, experts=experts))}
    whole = stages(33, ranks=ranks, experts=experts)
    inside, norm = found["final norm"]
    assert (inside, norm.launches, norm.cost.bytes) == ("norms", 1, 2 * 7168 * (4 * 33 + 1))
    inside, shared = found["shared expert"]
    inner, rows = 2048 // ranks, 33
    assert (inside, shared.launches) == ("experts", 2 * 60)
    assert shared.cost.flops == 60 * 2 * rows * 3 * 7168 * inner
    assert shared.cost.bytes == 60 * 2 * (3 * 7168 * inner + rows * (2 * 7168 + 3 * inner))
    assert all(part.cost.bytes < whole[inside].cost.bytes for inside, part in found.values())


def test_a_model_without_shared_experts_has_no_such_part():
    for changes in ({"n_shared_experts": 0}, {"num_hidden_layers": TARGET.first_k_dense_replace}):
        parts = round_parts(replace(TARGET, **changes), step(9))
        assert [part.name for _, part in parts] == ["final norm"]


def test_weights_of_a_rank_are_about_a_tenth_of_published():
    assert total(stages(256, drafter=None, ranks=8, context=0)) / 2**30 == pytest.approx(548.8 / 8, rel=0.08)


def test_whole_experts_wait_for_the_busiest_rank():
    split, whole = stages(1, ranks=8), stages(1, ranks=8, experts="ep")
    shared = 60 * 2 * 3 * 7168 * 2048 // 8
    routed = [found["experts"].cost.bytes - shared for found in (split, whole)]
    assert routed[1] / routed[0] == pytest.approx(2.6, rel=0.02)


def test_context_moves_the_attention_and_the_drafter_alone():
    near, far = stages(9, context=1024), stages(9, context=8192)
    assert {name for name in near if near[name] != far[name]} == {"attention", "draft attention"}
    keys = 61 * 2 * 576 * (8192 - 1024)
    assert far["attention"].cost.bytes - near["attention"].cost.bytes == keys


def test_fewer_distinct_experts_are_fewer_bytes():
    independent, alike = step(33), replace(step(33), distinct=distinct_experts(33, g=0.8, **EXPERTS))
    more, less = (sum(s.cost.bytes for s in round_stages(TARGET, None, x)) for x in (independent, alike))
    assert more - less == pytest.approx(60 * 24_772_608 * (independent.distinct - alike.distinct), rel=1e-6)


def test_a_floor_is_the_longer_time_and_its_launches():
    found = stages(33, ranks=8)["o_proj"]
    assert found.floor_us(**H200) == pytest.approx(1e6 * found.cost.bytes / 4.2e12 + 61 * 1.1)
    bound = stages(128, streams=32, context=8192, drafter=None)["attention"]
    assert bound.floor_us(**H200) == pytest.approx(1e6 * bound.cost.flops / 7.8e14 + 61 * 1.1)


def test_all_reduces_are_two_a_layer_and_the_listed_ones():
    assert all_reduces(TARGET, DRAFTER, step(33)) == (0, 0)
    calls, moved = all_reduces(TARGET, None, step(33, ranks=8))
    assert (calls, moved) == (1 + 2 * 61, (1 + 2 * 61) * 33 * 7168 * 2)
    assert all_reduces(TARGET, DRAFTER, step(33, ranks=8))[0] == calls + 2 + 2 * 6


@pytest.mark.parametrize(
    ("change", "name"),
    [({"rows": 0}, "rows"), ({"distinct": 0.0}, "distinct"), ({"context": -1}, "context"), ({"experts": "x"}, "exp")],
)
def test_wrong_steps_are_named(change, name):
    with pytest.raises(ArgumentError, match=name):
        replace(step(8), **change)


def test_ranks_must_divide():
    with pytest.raises(ArgumentError, match="num_attention_heads = 64"):
        round_stages(TARGET, None, step(8, ranks=7))
    with pytest.raises(ArgumentError, match="of the drafter = 8"):
        round_stages(TARGET, DRAFTER, step(8, ranks=16))


def test_a_routed_step_touches_the_experts_of_the_formula():
    assert Step.routed(TARGET, 1, 0.8).distinct == pytest.approx(8)
    assert Step.routed(TARGET, 8, 0.8).distinct == pytest.approx(40.4, abs=0.1)
    assert Step.routed(TARGET, 8, 0.8, streams=4, ranks=8) == step(8, streams=4, ranks=8, g=0.8)


def test_a_rank_holds_its_share_of_the_published_bytes_and_what_every_rank_holds():
    whole, rank = rank_weights(TARGET, DRAFTER, 1), rank_weights(TARGET, DRAFTER, 8)
    drafter = 6 * (7168 * (64 + 16) * 128 + 64 * 128 * 7168 + 3 * 7168 * 18432) * 2 + 7 * 7168 * 7168 * 2
    assert whole == pytest.approx(594_205_904_896 + drafter, rel=0.01)
    replicated = 61 * 2112 * 7168 * 2 + 60 * 384 * 7168 * 2
    assert rank == pytest.approx((whole - replicated) / 8 + replicated, rel=0.01)
