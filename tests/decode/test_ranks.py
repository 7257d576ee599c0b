"""Several ranks over gloo decode what one rank decodes: tokens, trees, paths and experts, however experts are split."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import kdlab
from kdlab.decode.decoding import start
from kdlab.errors import ArgumentError
from kdlab.kernels.philox import gumbel_noise
from kdlab.model.ranks import Ranks
from tests.decode.test_lossless import teacher_forced
from tests.pairs import golden_prompts, tiny_pair
from tests.rank_processes import free_port, run_ranks, values_of
from tests.thread_ranks import on_thread_ranks

CASES = {
    "tree": dict(budget=15, record_experts=True),
    "tree at 0.8, top-p": dict(budget=9, temperature=0.8, top_p=0.9, seed=3, streams=1),
    "chain at 1.0": dict(method="chain", temperature=1.0, seed=2**40),
    "ar": dict(method="ar"),
}
SPLITS = {("tp", 2): CASES, ("ep", 2): ("tree", "tree at 0.8, top-p")}
SPLITS |= {("tp", 4): SPLITS["ep", 2], ("ep", 4): SPLITS["ep", 2]}
NUM_TOKENS = 10
# What rank 0 and rank 1 are given.
OTHER_OPTIONS = dict(seed=(0, 1), max_new_tokens=(8, 9), budget=(8, 9), method=("ddtree", "chain"), prompt=("a", "b"))
OTHER_MODELS = dict(
    dtype=("float32", "bfloat16"), experts=("tp", "ep"), latent_norm_eps=(1e-6, 1e-5), rope_amplitude=(1.0, 1.4159)
)
PATIENCE_S = 3.0
HOW = "killed, ended by an error, or gone without `Ranks.close()`"
LOST = f"rank 1 gave no sign of life for 3 s: {HOW}; rank 0 ends too"


def decode(pair, name):
    run = kdlab.generate(pair, golden_prompts()[:2], max_new_tokens=NUM_TOKENS, **CASES[name])
    return run.output_ids, [[as_plain(record) for record in records] for records in run.rounds]


def as_plain(record):
    tree, experts = record.tree, record.expert_ids
    fields = {name: getattr(tree, name).tolist() for name in ("token", "parent", "depth", "rank", "num_nodes", "logp")}
    fields |= dict(start=record.anchor_position, path=record.path, bonus=record.bonus)
    return fields | dict(targets=record.target_tokens.tolist(), experts=None if experts is None else experts.tolist())


@cache
def on_one_rank(dtype, name):
    return decode(tiny_pair(dtype), name)


def on_every_rank(rank, size, experts, dtype, cases):
    """Rounds of each case, the collectives of one round of each, and of two ranks the tree without sums it needs."""
    pair = kdlab.load_pair("tiny", ranks=size, experts=experts, dtype=dtype)
    found = {name: decode(pair, name) for name in cases}
    calls = {name: calls_of_a_round(pair, name) for name in cases}
    wrong = {kind: without_sums(pair, kind) for kind in ("attention", "mlp")} if size == 2 else {}
    pair.ranks.close()
    return found, calls, wrong


def without_sums(pair, kind):
    whole = Ranks.all_reduce
    Ranks.all_reduce = lambda self, x, of: x if of == kind else whole(self, x, of)
    try:
        return decode(pair, "tree")
    finally:
        Ranks.all_reduce = whole


def fields_and_disagreement(rank):
    """What `record` keeps, and what ranks say that were asked for different things."""
    pair = kdlab.load_pair("tiny", ranks=2, dtype="float64")
    field = kdlab.record(pair, golden_prompts()[:1], top_k=20, max_new_tokens=6).prompts[0]
    said = [refusal(pair, **{name: values[rank]}) for name, values in OTHER_OPTIONS.items()]
    for name, values in OTHER_MODELS.items():
        said.append(refusal(kdlab.load_pair("tiny", ranks=2, **{name: values[rank]})))
    for part in ("target", "drafter"):
        other = kdlab.load_pair("tiny", ranks=2)
        model = getattr(other, part)
        model.config = replace(model.config, rms_norm_eps=10.0 ** -(5 + rank))
        said.append(refusal(other))
    pair.ranks.close()
    return (field.token_ids, field.log_probs, field.next_rank), said


def refusal(pair, prompt="abc", **options):
    """What a decode says that another rank was asked for differently."""
    with pytest.raises(ArgumentError) as caught:
        kdlab.generate(pair, prompt, **options)
    return str(caught.value)


def calls_of_a_round(pair, name):
    engine = start(pair, golden_prompts()[:2], max_new_tokens=NUM_TOKENS, graph="off", **CASES[name])
    pair.ranks.calls.clear()
    engine.step()
    return pair.ranks.calls.copy()


@pytest.mark.parametrize(("experts", "size"), SPLITS)
def test_rounds_are_those_of_one_rank_in_float64(experts, size, tmp_path):
    cases = SPLITS[experts, size]
    ended = run_ranks(size, on_every_rank, size, experts, "float64", tuple(cases), folder=tmp_path)
    for rank, (found, calls, wrong) in enumerate(values_of(ended)):
        for name in cases:
            assert found[name] == on_one_rank("float64", name), (rank, name)
            assert calls[name] == expected_calls(name), name
        assert all(rounds != on_one_rank("float64", "tree") for rounds in wrong.values())


def expected_calls(name):
    """Two sums a target layer; two embeddings, of block and tree; a message a head, and its mass with top-p."""
    target, drafter = tiny_pair("float64").target.config, tiny_pair("float64").drafter.config
    layers = target.num_hidden_layers
    calls = Counter(attention=layers, mlp=layers, embedding=1, head=2 if "top-p" in name else 1)
    if name != "ar":  # two sums a layer, and the feature's parts
        calls += Counter(drafter=2 * drafter.num_hidden_layers + 1, embedding=1, head=1)
    return calls


@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_int4_experts_split_as_well(experts):
    def work(pair):
        run = kdlab.generate(pair, "3 + 4 = ", budget=9, max_new_tokens=10, record_experts=True)
        return [as_plain(record) for record in run.rounds[0]]

    place = dict(device="cpu", dtype=torch.float64)
    alone = work(kdlab.load_pair("bundled", dtype="float64"))
    assert on_thread_ranks(4, experts, work, name="bundled", **place) == [alone] * 4


@pytest.mark.parametrize(("experts", "size"), [("tp", 2), ("ep", 4)])
def test_float32_follows_the_near_tie_rule(experts, size, tmp_path):
    cases = ("tree", "chain at 1.0")
    ended = values_of(run_ranks(size, on_every_rank, size, experts, "float32", cases, folder=tmp_path))
    for name in cases:
        outputs = [found[name][0] for found, _, _ in ended]
        assert all(output == outputs[0] for output in outputs)
        assert below_the_best(outputs[0], **CASES[name]) <= 1e-3
    if size == 2:
        assert below_the_best(ended[0][2]["attention"][0], **CASES["tree"]) > 0.1


def below_the_best(outputs, *, temperature=0.0, seed=0, **_):
    """How far tokens are at most below the best of one rank in float64: in logits, or in logits / T with the noise."""
    pair, most = tiny_pair("float64"), 0.0
    for stream, (prompt, output_ids) in enumerate(zip(golden_prompts()[:2], outputs, strict=True)):
        prompt_ids = pair.tokenizer.encode(prompt)
        scores = teacher_forced(pair, prompt_ids + output_ids)[len(prompt_ids) - 1 : -1].double()
        if temperature:
            position = torch.arange(len(prompt_ids), len(prompt_ids) + len(output_ids))[None]
            noise = gumbel_noise(seed, torch.tensor([stream]), position, scores.shape[1])[0]
            scores = scores / temperature + noise
        chosen = scores.gather(1, torch.tensor(output_ids)[:, None])[:, 0]
        most = max(most, (scores.amax(1) - chosen).max().item())
    return most


def test_ranks_record_the_field_of_one_and_refuse_to_disagree(tmp_path):
    alone = kdlab.record(tiny_pair("float64"), golden_prompts()[:1], top_k=20, max_new_tokens=6).prompts[0]
    for rank, (arrays, said) in enumerate(values_of(run_ranks(2, fields_and_disagreement, folder=tmp_path))):
        for got, want in zip(arrays, (alone.token_ids, alone.log_probs, alone.next_rank), strict=True):
            assert np.array_equal(got, want)
        names = [*("prompts" if name == "prompt" else name for name in OTHER_OPTIONS), *OTHER_MODELS]
        differ = f"expected the same on every rank, got another on rank {rank} than on [{1 - rank}]"
        assert said == [f"{name}: {differ}" for name in [*names, "target's config", "drafter's config"]]


def lose_rank_1(rank, how, device="cpu", graph="off"):
    """Decode, but rank 1 is gone in the middle of a round, before the sum of a layer, or of a captured one."""
    pair = kdlab.load_pair("tiny", ranks=2, device=device)
    pair.ranks.watch.patience_s = PATIENCE_S
    engine = start(pair, golden_prompts()[:1], max_new_tokens=NUM_TOKENS, graph=graph)
    engine.step()
    sums, whole = [], Ranks.all_reduce

    def lose():
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exited":
            sys.exit(1)
        raise MemoryError("no room")

    def last_sum(self, x, kind):
        sums.append(kind)
        if self.rank == 1 and sums.count("mlp") == 2:
            lose()
        return whole(self, x, kind)

    if graph == "on" and rank == 1:
        lose()
    Ranks.all_reduce = last_sum
    while not engine.done:
        engine.step()


@pytest.mark.parametrize(("how", "exitcode"), [("killed", -signal.SIGKILL), ("raised", 3)])
def test_a_lost_rank_ends_the_others_with_its_name(how, exitcode, tmp_path):
    began = time.monotonic()
    other, lost = run_ranks(2, lose_rank_1, how, folder=tmp_path)
    assert lost.exitcode == exitcode
    assert other.exitcode == 1
    assert LOST in other.said
    assert time.monotonic() - began < 60


def test_a_rank_that_exits_in_a_round_has_not_taken_its_leave():
    """In processes of their own: what Python runs at an exit, it does not run in a child of `multiprocessing`."""
    address = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import lose_rank_1; lose_rank_1({rank}, 'exited')"],
            env=address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert LOST in said[0]
