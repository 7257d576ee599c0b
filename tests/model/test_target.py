"""The target against transformers, and against itself: trees, batches, caches."""

import pytest
import torch
from torch.testing import assert_close

from kdlab.config import TargetConfig
from kdlab.errors import ArgumentError, ShapeError
from kdlab.model.target import Target
from tests.model.targets import logits_of, new_cache, prefill, reference_model, saved, triangle, yarn
from tests.pairs import golden_rounds, tiny_pair

VARIANTS = {
    "yarn-64-interleaved": {"rope_parameters": yarn(64)},
    "yarn-1": {"rope_parameters": yarn(1)},
    "yarn-8-mscale": {"rope_parameters": yarn(8, mscale=0.7, mscale_all_dim=1.3, theta=10000.0)},
    "yarn-amplitude": {"rope_parameters": yarn(8, mscale_all_dim=0.0)},
    "plain-rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "half-split": {"rope_interleave": False},
    "no-q-lora": {"q_lora_rank": None},
    "groups": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2},
    "raw-weights": {"norm_topk_prob": False, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
    "other-dims": {"num_attention_heads": 5, "num_key_value_heads": 5, "v_head_dim": 16, "kv_lora_rank": 40},
    "all-dense": {"first_k_dense_replace": 3},
    "all-moe": {"first_k_dense_replace": 0},
}
# Node i's parent; three branches, siblings far apart in index.
PARENTS = [-1, 0, 0, 1, 2, 1, 4, 0, 6, 3]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers_past_position_64(name, tmp_path):
    model = reference_model(seed=len(name), **VARIANTS[name])
    ours = saved(model, tmp_path)
    tokens = torch.randint(0, 61, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
    assert expected.std() > 0.3
    assert_close(logits_of(ours, tokens, [37, 1, 64, 47, 1]), expected, atol=1e-4, rtol=0)


def test_tied_head_equals_transformers(tmp_path):
    model = reference_model(tie_word_embeddings=True)
    model.tie_weights()
    tokens = torch.arange(9)[None]
    ours = saved(model, tmp_path)
    assert ours.lm_head is None
    with torch.no_grad():
        assert_close(logits_of(ours, tokens, [9]), model(tokens).logits, atol=1e-4, rtol=0)


def test_latent_norm_epsilon_is_1e_6_unless_asked_otherwise(tmp_path):
    model = reference_model(seed=3)
    with torch.no_grad():  # rows so small that the epsilon of the latent norms decides their size
        for layer in model.model.layers:
            layer.self_attn.q_a_proj.weight *= 1e-3
            layer.self_attn.kv_a_proj_with_mqa.weight *= 1e-3
    tokens = torch.arange(20)[None]
    default, other = saved(model, tmp_path), saved(model, tmp_path, latent_norm_eps=1e-5)
    with torch.no_grad():
        expected = model(tokens).logits
    assert_close(logits_of(default, tokens, [20]), expected, atol=1e-4, rtol=0)
    assert (logits_of(other, tokens, [20]) - expected).abs().max() > 1e-2


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return saved(reference_model(seed=5), tmp_path_factory.mktemp("target"), dtype=torch.float64)


def tree_rows():
    depth, mask = [0] * len(PARENTS), torch.eye(len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS[1:], start=1):
        depth[node] = depth[parent] + 1
        mask[node] |= mask[parent]
    return torch.tensor(depth), mask


def verify(target, tokens, cache, prefix, **options):
    depth, mask = tree_rows()
    streams = tokens.shape[0]
    start = torch.as_tensor(prefix).expand(streams)
    return target(tokens, start[:, None] + depth, cache, start, mask.expand(streams, -1, -1), **options)


def prompt(length, seed=0, streams=1):
    return torch.randint(0, 61, (streams, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65])
def test_tree_rows_equal_chains_of_their_ancestors(target, prefix):
    committed, tokens = prompt(prefix), prompt(len(PARENTS), seed=3)
    cache = new_cache(target)
    prefill(target, cache, committed, [prefix] if prefix else [])
    hidden = verify(target, tokens, cache, prefix).hidden
    _, mask = tree_rows()
    for node in range(len(PARENTS)):
        path = torch.cat([committed, tokens[:, mask[node]]], dim=1)
        chain = prefill(target, new_cache(target), path, [path.shape[1]])
        assert_close(hidden[0, node], chain[0, -1], atol=1e-11, rtol=1e-11)


def test_index_positions_would_fail_the_chain_test(target):
    committed, tokens = prompt(20), prompt(len(PARENTS), seed=3)
    cache = new_cache(target)
    prefill(target, cache, committed, [20])
    _, mask = tree_rows()
    positions = 20 + torch.arange(len(PARENTS))[None]
    hidden = target(tokens, positions, cache, torch.tensor([20]), mask[None]).hidden
    right = verify(target, tokens, cache, 20).hidden
    assert (hidden - right).abs().amax(-1)[0, 4] > 1e-3


def test_batch_of_different_prefixes_equals_single_runs(target):
    lengths = [0, 1, 63, 64, 70]
    tokens = prompt(len(PARENTS), seed=8, streams=5)
    cache = new_cache(target, 5)
    # Pages in an order that no stream would guess.
    cache.block_table.copy_(torch.randperm(20, generator=torch.Generator().manual_seed(2)).view(5, 4))
    for stream, length in enumerate(lengths):
        prefill(target, cache.stream(stream), prompt(length, seed=stream), [length] if length else [])
    out = verify(target, tokens, cache, torch.tensor(lengths), taps=(1, 0), collect_experts=True)
    for stream, length in enumerate(lengths):
        alone = new_cache(target)
        prefill(target, alone, prompt(length, seed=stream), [length] if length else [])
        single = verify(target, tokens[stream : stream + 1], alone, length, taps=(1, 0), collect_experts=True)
        assert_close(out.hidden[stream], single.hidden[0], atol=1e-11, rtol=1e-11)
        assert_close(out.taps[stream], single.taps[0], atol=1e-11, rtol=1e-11)
        assert torch.equal(out.expert_ids[stream], single.expert_ids[0])


def test_padded_rows_change_nothing(target):
    committed, tokens = prompt(70), prompt(len(PARENTS), seed=3)
    depth, mask = tree_rows()
    cache = new_cache(target)
    prefill(target, cache, committed, [70])
    plain = verify(target, tokens, cache, 70).hidden
    padded_mask = torch.zeros(1, 16, 16, dtype=torch.bool)
    padded_mask[0, :10, :10] = mask
    positions = 70 + torch.nn.functional.pad(depth, (0, 6))[None]
    padded = torch.nn.functional.pad(tokens, (0, 6), value=-1)
    out = target(padded, positions, cache, torch.tensor([70]), padded_mask).hidden
    assert_close(out[:, :10], plain, atol=1e-12, rtol=1e-12)
    assert out.isfinite().all()


def test_stale_rows_of_a_rejected_tree_are_never_read(target):
    committed, tokens = prompt(62), prompt(len(PARENTS), seed=3)
    fresh, stale = new_cache(target), new_cache(target, poisoned=False)
    for cache in (fresh, stale):
        prefill(target, cache, committed, [62])
    stale.pages[:, 0, 62:] = 1e4
    stale.pages[:, 1:] = -1e4
    expected = verify(target, tokens, fresh, 62).hidden
    assert torch.equal(verify(target, tokens, stale, 62).hidden, expected)


@pytest.mark.parametrize("path", [[0, 2, 4, 6, 8], [0, 7], [0, 1, 3, 9], [0]])
def test_commit_equals_sequential_decode_and_so_do_the_next_20_tokens(target, path):
    committed, tokens = prompt(60), prompt(len(PARENTS), seed=3)
    cache, plain = new_cache(target), new_cache(target)
    prefill(target, cache, committed, [60])
    verify(target, tokens, cache, 60)
    accepted = torch.full((1, 8), -1)
    accepted[0, : len(path)] = torch.tensor(path)
    cache.commit(torch.tensor([60]), accepted)
    text = torch.cat([committed, tokens[:, path]], dim=1)
    prefill(target, plain, text, [60] + [1] * len(path))
    length = text.shape[1]
    rows = [pages.flatten(1, 2)[:, :length] for pages in (cache.pages, plain.pages)]
    assert_close(rows[0], rows[1], atol=1e-11, rtol=1e-11)
    more = prompt(20, seed=9)
    after = [prefill(target, c, more, [1] * 20, start=length) for c in (cache, plain)]
    assert_close(after[0], after[1], atol=1e-11, rtol=1e-11)


def test_taps_are_the_layers_outputs_in_the_order_asked_for(tmp_path):
    model = reference_model(seed=2)
    ours = saved(model, tmp_path)
    tokens = prompt(12)
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states
    out = ours(tokens, torch.arange(12)[None], new_cache(ours), torch.tensor([0]), triangle(1, 12), taps=(1, 0))
    assert_close(out.taps, torch.cat([states[2], states[1]], dim=-1), atol=1e-4, rtol=1e-4)
    shifted = torch.cat([states[1], states[0]], dim=-1)
    assert (out.taps - shifted).abs().max() > 0.1


def test_expert_ids_are_those_of_the_reference_router(tmp_path):
    model = reference_model(seed=4)
    ours, tokens, found = saved(model, tmp_path), prompt(12), []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, output: found.append(output[2]))
    with torch.no_grad():
        model(tokens)
    first = torch.tensor([0])
    out = ours(tokens, torch.arange(12)[None], new_cache(ours), first, triangle(1, 12), collect_experts=True)
    assert out.expert_ids.dtype == torch.int16
    assert list(out.expert_ids.shape) == [1, 2, 12, 3]
    for layer, expected in enumerate(found):
        assert torch.equal(out.expert_ids[0, layer].long().sort().values, expected.sort().values)


def test_golden_prompt_logits():
    pair = tiny_pair()
    for case in golden_rounds():
        tokens = torch.tensor([case["prompt_ids"]])
        last = logits_of(pair.target, tokens, [tokens.shape[1]])[0, -1]
        assert_close(last, torch.tensor(case["prompt_last_logits"]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_stay_close_to_float32(dtype, tmp_path):
    model = reference_model(seed=7)
    full, other = saved(model, tmp_path), saved(model, tmp_path, dtype=dtype)
    tokens = prompt(80)
    expected, got = logits_of(full, tokens, [80]), logits_of(other, tokens, [80])
    assert got.dtype == dtype
    assert other.layers[1].mlp.router.bias.dtype != torch.bfloat16
    # A near-tie of the router sends a row to other experts in bfloat16: most rows stay close, not all.
    error = (got.double() - expected.double()).abs().amax(-1)
    assert error.median() < (0.2 if dtype == torch.bfloat16 else 1e-4)


def test_gradients_reach_every_weight_without_a_cache(target):
    config = target.config
    trained = Target(config, dtype=torch.float64)
    assert not any(parameter.requires_grad for parameter in trained.parameters())
    with torch.no_grad():
        for name, part in trained.views().items():
            part.view.copy_(target.views()[name].view)
    trained.requires_grad_()
    tokens = prompt(12)
    out = trained(tokens, torch.arange(12)[None], None, torch.tensor([0]), triangle(1, 12))
    assert_close(out.hidden, prefill(target, new_cache(target), tokens, [12]), atol=1e-11, rtol=1e-11)
    trained.head(out.hidden).logsumexp(-1).sum().backward()
    # The correction bias only takes part in a choice, which has no gradient.
    without = {name for name, parameter in trained.named_parameters() if parameter.grad is None}
    moe = filter(config.is_moe_layer, range(config.num_hidden_layers))
    assert without == {f"layers.{layer}.mlp.router.bias" for layer in moe}


def test_a_padded_row_leaves_gradients_finite():
    config = tiny_pair().target.config
    trained = Target(config)
    with torch.no_grad():
        for name, part in trained.views().items():
            part.view.copy_(tiny_pair().target.views()[name].view)
    trained.requires_grad_()
    mask = triangle(1, 6)
    mask[0, 4:] = False
    out = trained(torch.arange(6)[None], torch.arange(6)[None], None, torch.tensor([0]), mask)
    trained.head(out.hidden[:, :4]).logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() for p in trained.parameters() if p.grad is not None)


def test_wrong_arguments_are_named(target):
    cache, mask, one = new_cache(target, max_rows=64), triangle(1, 2), torch.tensor([0])
    tokens, positions = torch.tensor([[3, 4]]), torch.tensor([[0, 1]])
    with pytest.raises(ShapeError, match="positions"):
        target(tokens, positions[:, :1], cache, one, mask)
    with pytest.raises(ShapeError, match="mask"):
        target(tokens, positions, cache, one, mask[:, :1])
    with pytest.raises(ArgumentError, match="taps"):
        target(tokens, positions, cache, one, mask, taps=(3,))
    with pytest.raises(ArgumentError, match="taps"):
        target(tokens, positions, cache, one, mask, taps=(-1,))
    with pytest.raises(ArgumentError, match="tokens"):
        target(torch.tensor([[3, 61]]), positions, cache, one, mask)
    with pytest.raises(ArgumentError, match="cache rows 0 to 63"):
        target(tokens, positions, cache, torch.tensor([63]), mask)
    with pytest.raises(ArgumentError, match="dtype"):
        Target(target.config, dtype=torch.float16)


def test_no_constant_stands_in_the_code(target):
    assert isinstance(target.config, TargetConfig)
    assert target.config.routed_scaling_factor == 2.5
    assert target.config.softmax_scale == pytest.approx(20**-0.5 * (0.1 * torch.log(torch.tensor(8.0)).item() + 1) ** 2)
