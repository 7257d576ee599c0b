"""What the ops of a decode run as is what was asked for, in the drafter too, and the provenance says what fell back."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import kdlab
from kdlab.decode.round import _left_to_torch
from kdlab.decode.settings import make_settings
from kdlab.kernels import draft_attention
from kdlab.model import drafter, drafter_layers, layers, pair, target
from kdlab.model.drafter import Drafter
from kdlab.model.pair import Pair
from kdlab.model.ranks import Ranks
from kdlab.model.target import Target
from tests.pairs import tiny_pair

DRAFTER_OPS = (
    *((drafter, name) for name in ("skinny_linear", "add_norm")),
    *((drafter_layers, name) for name in ("skinny_linear", "skinny_matmul", "add_norm")),
    *((drafter_layers, name) for name in ("head_norm_rope", "append_context", "draft_attention")),
)
SHARED_OPS = (layers, "skinny_linear"), (target, "embed_shard")  # the target asks for "reference" on the CPU


@pytest.fixture
def asked(monkeypatch):
    """A dict of op -> the impls that it was called with, "(default)" where the caller did not say."""
    found = {}

    def spy(module, name):
        original, key = getattr(module, name), f"{module.__name__}.{name}"

        def call(*args, **options):
            found.setdefault(key, set()).add(options.get("impl", "(default)"))
            return original(*args, **options)

        monkeypatch.setattr(module, name, call)

    for module, name in (*DRAFTER_OPS, *SHARED_OPS):
        spy(module, name)
    return found


def one_of_four():
    """A pair that is one rank's slice, so that embeddings are of a shard."""
    whole, options = tiny_pair(), dict(ranks=Ranks.slice_of(1, 4, "ep"), dtype=torch.float32)
    models = Target(whole.target.config, **options), Drafter(whole.drafter.config, **options)
    generator = torch.Generator().manual_seed(0)
    for model in models:
        for parameter in model.parameters():
            parameter.normal_(0, 0.1, generator=generator)
    return Pair(*models, whole.tokenizer, "slice", "", "", torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("method", [dict(budget=4), dict(method="chain")], ids=str)
def test_the_drafters_ops_run_as_the_decode_says(method, asked):
    run = kdlab.generate(one_of_four(), "abc", impl="reference", max_new_tokens=4, stop_token_ids=[], **method)
    assert run.provenance["impl"] == "reference"
    assert len(asked) == len(DRAFTER_OPS) + len(SHARED_OPS)
    assert set().union(*asked.values()) == {"reference"}
    asked.clear()
    kdlab.generate(one_of_four(), "abc", max_new_tokens=4, stop_token_ids=[], **method)
    for module, name in DRAFTER_OPS:
        assert asked[f"{module.__name__}.{name}"] == {"auto"}
    for module, name in SHARED_OPS:
        assert asked[f"{module.__name__}.{name}"] == {"auto", "reference"}


def test_a_recording_runs_the_drafters_ops_as_its_decode_does(asked):
    kdlab.record(tiny_pair("float64"), "abc", top_k=4, max_new_tokens=4)  # float64 has no CUDA ops
    assert set().union(*asked.values()) == {"reference"}


def test_torch_ranks_more_candidates_than_the_kernel_keeps_and_nothing_else(asked, monkeypatch):
    monkeypatch.setattr(pair, "top_over_ranks", lambda ranks, logits, k, impl: impl)
    one = tiny_pair()
    anchor, context = torch.tensor([3]), one.new_context(1, 8)
    assert one.draft_top(anchor, torch.tensor([0]), context, 256) == "auto"
    assert one.draft_top(anchor, torch.tensor([0]), context, 257) == "reference"
    assert asked["kdlab.model.drafter_layers.draft_attention"] == {"auto"}


# -- what the provenance says ------------------------------------------------------------------------------------------


def on_a_gpu(monkeypatch, *, dtype=torch.bfloat16, arch="sm_90a", ranks=1, head_dim=32, **target_changes):
    """What a round needs to know of a pair, as if it were on a GPU."""
    monkeypatch.setattr(draft_attention, "arch_of", lambda device: arch)
    tiny = tiny_pair()
    config = replace(tiny.target.config, **target_changes)
    drafter_config = replace(tiny.drafter.config, head_dim=head_dim)
    return SimpleNamespace(
        target=SimpleNamespace(config=config), drafter=SimpleNamespace(config=drafter_config),
        device=torch.device("cuda"), dtype=dtype, ranks=SimpleNamespace(size=ranks),
    )  # fmt: skip


CASES = [
    ({}, ()),
    (dict(dtype=torch.float32), ("draft_attention",)),
    (dict(head_dim=96), ("draft_attention",)),
    (dict(arch="sm_75"), ("draft_attention",)),
    (dict(n_group=4, topk_group=2), ("router",)),
    (dict(n_routed_experts=64, num_experts_per_tok=33), ("router",)),
    (dict(n_routed_experts=1025), ("router",)),
    (dict(n_routed_experts=1025, first_k_dense_replace=99), ()),  # no layer routes
    (dict(hidden_size=132), ("add_norm",)),
    (dict(hidden_size=132, dtype=torch.float32), ("draft_attention",)),  # whole words again
    (dict(hidden_size=132, ranks=2), ("add_norm", "embed_shard")),
]


@pytest.mark.parametrize(("changes", "left"), CASES, ids=str)
def test_ops_without_a_kernel_for_this_pair_are_named(changes, left, monkeypatch):
    one = on_a_gpu(monkeypatch, **changes)
    assert _left_to_torch(one, make_settings(tiny_pair(), 1)) == {f"{name}=reference" for name in left}
    assert _left_to_torch(one, make_settings(tiny_pair(), 1, impl="reference")) == set()


def test_a_decode_without_a_drafter_leaves_no_draft_attention_to_torch(monkeypatch):
    one = on_a_gpu(monkeypatch, dtype=torch.float32)
    assert _left_to_torch(one, make_settings(tiny_pair(), 1, method="ar")) == set()
