"""Which part of a checkpoint each rank holds, what is refused before anything is read, and one slice timed alone."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import kdlab
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.errors import ArgumentError
from kdlab.kernels.draft_topk import draft_topk_shard, merge_topk
from kdlab.kernels.reference import draft_topk
from kdlab.model.checkpoint import Checkpoint
from kdlab.model.drafter import Drafter, plan_drafter
from kdlab.model.pair import Pair
from kdlab.model.rank_heads import top_over_ranks
from kdlab.model.ranks import ONE_RANK, Ranks
from kdlab.model.target import Target, plan_target
from kdlab.model.target_tensors import load_tensors
from kdlab.paths import DATA, bundled_pair
from tests.pairs import tiny_pair
from tests.rank_processes import run_ranks, values_of

TINY = TargetConfig.load(DATA / "tiny-pair" / "target")
INT4 = dict(experts_int4=True)
TINY_DRAFTER = DrafterConfig.load(DATA / "tiny-pair" / "drafter")


def packed_target(directory, ranks):
    """The target as a GPU holds it, on the CPU."""
    config = TargetConfig.load(directory)
    target = Target(config, packed=True, ranks=ranks)
    with Checkpoint(directory) as checkpoint:
        load_tensors(target.views(), checkpoint, num_layers=config.num_hidden_layers, int4=True)
    return target


def assert_parts_cover(whole, slices):
    """Each part is what its index says of the whole tensor, and all ranks' parts are all of it."""
    for name, everything in whole.items():
        covered = torch.zeros(everything.shape, dtype=torch.bool)
        for parts in slices:
            part = parts[name]
            assert part.shape == everything.shape
            assert torch.equal(part.view, everything.view[part.index]), name
            covered[part.index] = True
        assert covered.all(), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_ranks_hold_the_target_between_them(experts, packed):
    directory, _ = bundled_pair("bundled")

    def load(ranks):
        if packed:
            return packed_target(directory, ranks).views()
        return plan_target(directory, device="cpu", dtype=torch.float32, ranks=ranks).read("cpu").views()

    slices = [load(Ranks.slice_of(rank, 4, experts)) for rank in range(4)]
    whole = load(ONE_RANK)
    assert_parts_cover(whole, slices)
    assert len({sum(part.view.nbytes for part in parts.values()) for parts in slices}) == 1
    slices[2]["model.layers.1.mlp.experts.13.up_proj.weight" + ("_scale" if packed else "")].view.add_(1)
    with pytest.raises(AssertionError):
        assert_parts_cover(whole, slices)


def test_ranks_hold_the_drafter_between_them():
    def load(ranks):
        return plan_drafter(DATA / "tiny-pair" / "drafter", dtype=torch.float32, ranks=ranks).read("cpu")

    slices = [load(Ranks.slice_of(rank, 4)) for rank in range(4)]
    assert_parts_cover(load(ONE_RANK).views(), [drafter.views() for drafter in slices])
    # Four ranks share two key heads: neighbours hold the same one.
    assert [drafter.heads.kv_heads.start for drafter in slices] == [0, 0, 1, 1]
    assert slices[0].new_context(1, 4, "cpu", torch.float32).keys.shape[3] == 1


@pytest.mark.parametrize(
    ("changes", "experts", "size", "message"),
    [
        (dict(num_attention_heads=6), "tp", 4, "num_attention_heads = 6, got 4"),
        (dict(vocab_size=130), "tp", 4, "vocab_size = 130, got 4"),
        (dict(n_routed_experts=6), "ep", 4, "n_routed_experts = 6, got 4"),
        (dict(intermediate_size=250), "ep", 4, "the inner width = 250, got 4"),
        (dict(moe_intermediate_size=66), "tp", 4, "moe_intermediate_size = 66, got 4"),
        (INT4 | dict(moe_intermediate_size=96), "tp", 2, "moe_intermediate_size = 96 in units of 32, got 2"),
        (INT4 | dict(moe_intermediate_size=96), "ep", 2, "the inner width = 96 in units of 32, got 2"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(changes, experts, size, message):
    with pytest.raises(ArgumentError, match=f"ranks: expected a number that divides {message}"):
        Target(replace(TINY, **changes), device="meta", ranks=Ranks.slice_of(0, size, experts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_attention_heads=6, num_key_value_heads=2), "the drafter's num_attention_heads = 6"),
        (dict(num_attention_heads=12, num_key_value_heads=3), "the drafter's num_key_value_heads = 3"),
        (dict(hidden_size=130), "the drafter's hidden_size = 130"),
        (dict(intermediate_size=250), "the inner width = 250"),
    ],
)
def test_a_drafter_that_ranks_do_not_divide_is_refused(changes, message):
    with pytest.raises(ArgumentError, match="ranks: expected a number that divides " + message):
        Drafter(replace(TINY_DRAFTER, **changes), device="meta", ranks=Ranks.slice_of(0, 4))


def load_with(rank, options):
    """What load_pair says on one of three ranks."""
    read = []
    try:
        kdlab.load_pair("tiny", progress=read.append, **options)
    except ArgumentError as error:
        return str(error), read
    return "no error", read


def test_load_pair_refuses_before_it_reads(tmp_path):
    for options, message in [
        (dict(ranks=3), "ranks: expected a number that divides vocab_size = 128, got 3"),
        (dict(ranks=2), "ranks: expected the 3 processes that torchrun started, got 2"),
    ]:
        assert values_of(run_ranks(3, load_with, options, folder=tmp_path)) == [(message, [])] * 3


def test_several_ranks_need_torchrun():
    for options, message in [
        (dict(ranks=2), "torchrun --nproc-per-node RANKS"),
        (dict(experts="pp"), "experts"),
        (dict(ranks=True), "ranks"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            kdlab.load_pair("tiny", **options)


@pytest.mark.parametrize("arguments", [(2, 2, "tp"), (-1, 2, "tp"), (0, 0, "tp"), (0, 2, "pp")])
def test_a_slice_must_be_one_of_its_ranks(arguments):
    with pytest.raises(ArgumentError):
        Ranks.slice_of(*arguments)


def test_one_slice_runs_alone_with_the_shapes_of_its_rank():
    ranks = Ranks.slice_of(1, 4, "ep")
    target, drafter = (model(config, ranks=ranks) for model, config in ((Target, TINY), (Drafter, TINY_DRAFTER)))
    generator = torch.Generator().manual_seed(0)
    for parameter in [*target.parameters(), *drafter.parameters()]:
        parameter.normal_(0, 0.1, generator=generator)
    pair = Pair(target, drafter, tiny_pair().tokenizer, "slice", "", "", torch.device("cpu"), torch.float32)
    assert target.embedding.shape == (32, 128)
    assert target.layers[1].mlp.routed.gate_up.shape[0] == 2
    run = kdlab.generate(pair, "abc", budget=5, max_new_tokens=6, stop_token_ids=[])
    assert len(run.output_ids[0]) == 6
    context = pair.new_context(1, 8)
    top = pair.draft_top(torch.tensor([3]), torch.tensor([0]), context, 64)
    assert all(len(set(row)) == 64 and set(row) <= set(range(128)) for row in top.token_ids[0].tolist())
    assert set(ranks.calls) == {"embedding", "attention", "mlp", "head", "drafter"}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_more_candidates_than_tokens_are_refused_on_any_number_of_ranks(size):
    ranks, logits = Ranks.slice_of(0, size), torch.zeros(1, 1, 8 // size)
    for k, message in [(9, "at most 8, got 9"), (0, "at least 1, got 0")]:
        with pytest.raises(ArgumentError, match=f"k: expected {message}"):
            top_over_ranks(ranks, logits, k, "auto")
    assert top_over_ranks(ranks, logits, 8, "auto").token_ids.shape == (1, 1, 8)


def test_one_rank_counts_nothing_and_returns_its_input():
    x = torch.ones(2, 3)
    assert ONE_RANK.all_reduce(x, "mlp") is x
    assert ONE_RANK.join(x, "drafter") is x
    assert ONE_RANK.calls == Counter()
    assert ONE_RANK.span(7) == slice(0, 7)


def test_shards_of_float64_logits_rank_what_float32_cannot_tell_apart():
    logits = torch.zeros(1, 1, 8, dtype=torch.float64)
    logits[0, 0, 6], logits[0, 0, 1] = 1 + 1e-12, 1
    merged = merge_topk([draft_topk_shard(part, 3, first_id=4 * i) for i, part in enumerate(logits.split(4, dim=-1))])
    assert merged.token_ids.tolist() == draft_topk(logits, 3).token_ids.tolist() == [[[6, 1, 0]]]
