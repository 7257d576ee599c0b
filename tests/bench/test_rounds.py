"""Wall time of live rounds, on a fake engine with a fake clock, then on the tiny pair."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

import kdlab
from kdlab.bench import Arm, cost_table, rounds, samples_frame, time_rounds
from kdlab.bench.host_rounds import HostRounds
from kdlab.bench.rows import write_rows
from kdlab.decode.methods import Method
from kdlab.decode.settings import make_settings
from kdlab.errors import ArgumentError, ComparisonError, NotSupported
from kdlab.machine import GPU_STATE_FIELDS
from kdlab.model.prompts import Prompt, PromptSet, as_prompt_set
from tests.pairs import golden_prompts, tiny_pair

NUM_ROUNDS = {"a": 2, "b": 3, "c": 0}
ROUND_S = {0: 0.010, 7: 0.020}  # by budget
AR, TREE = Arm("ar", 0), Arm("ddtree", 7)


class World:
    """A host clock, a device that works in order, and a log of what was decoded.

    On an asynchronous device the host goes on at once, and waits where it reads a round or asks for an idle device.
    """

    def __init__(self, monkeypatch, drift=0.0, asynchronous=False):
        self.now = self.device_free = 100.0
        self.drift, self.asynchronous, self.log = drift, asynchronous, []
        monkeypatch.setattr(rounds, "start", self.start)
        monkeypatch.setattr(rounds, "decode_provenance", provenance)
        monkeypatch.setattr(rounds, "gpu_state", lambda device: dict.fromkeys(GPU_STATE_FIELDS))
        monkeypatch.setattr(rounds.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.wait_until(self.device_free))

    def work(self, seconds):
        """Queue work and return when it ends."""
        self.device_free = max(self.device_free, self.now) + seconds
        if not self.asynchronous:
            self.wait_until(self.device_free)
        return self.device_free

    def wait_until(self, moment):
        self.now = max(self.now, moment)

    def start(self, pair, prompts, *, method, budget, width, graph, streams, **options):
        captured = graph == "on" or (graph == "auto" and pair.device.type == "cuda" and method != "beam")
        settings = SimpleNamespace(method=Method(method, budget, width, 1, None, True), graph=captured, streams=streams)
        return Engine(self, pair, prompts, settings)


class Engine:
    def __init__(self, world, pair, prompts, settings):
        self.world, self.pair, self.prompts, self.settings, self.impl = world, pair, prompts, settings, "fake"
        self.ahead = 1 if world.asynchronous else 0
        self.restart()

    def restart(self):
        self.waiting, self.left, self.on_device, self.queued = list(self.prompts), [], [], []

    @property
    def num_running(self):
        return sum(left > 0 for left in self.left)

    def admit(self):
        assert self.num_running == 0
        group, self.waiting = self.waiting[: self.settings.streams], self.waiting[self.settings.streams :]
        self.left = self.on_device = [NUM_ROUNDS[prompt.id] for prompt in group]
        for prompt in group:
            self.world.work(5.0)
            self.world.log.append((prompt.id, self.settings.method.budget))

    def step(self, *, admit):
        assert not admit
        budget = self.settings.method.budget
        end = self.world.work(ROUND_S[budget] + self.world.drift * len(self.world.log))
        ran = [SimpleNamespace(num_tokens=1 + budget, anchor_position=39 + left) for left in self.on_device if left]
        self.on_device = [max(left - 1, 0) for left in self.on_device]
        self.queued.append((end, ran, self.on_device))
        if len(self.queued) <= self.ahead:
            return []
        end, ran, left = self.queued.pop(0)
        self.world.wait_until(end)
        if ran:
            self.left = left
        return ran


def provenance(pair, settings, prompts, **more):
    facts = {"streams": settings.streams, "prompt_set_digest": prompts.digest, "num_prompts": len(prompts)}
    return facts | more


GPU = SimpleNamespace(device=torch.device("cuda", 0))
PAIR = SimpleNamespace(device=torch.device("cpu"))
PROMPTS = PromptSet.of("set", [Prompt("a", "code", text="x"), Prompt("b", "prose", text="y")])


def by_metric(rows):
    return {(row["method"], row["metric"]): row for row in rows.to_dict("records")}


def test_rows_of_each_arm(monkeypatch):
    World(monkeypatch)
    rows = by_metric(time_rounds(PAIR, PROMPTS, [AR, TREE], max_new_tokens=9, repeats=2))
    assert len(rows) == 6
    tree = rows["ddtree", "round_ms"]
    assert (tree["n"], tree["unit"]) == (10, "ms")
    assert (tree["value"], tree["p10"], tree["p90"]) == pytest.approx((20.0, 20.0, 20.0))
    assert tree["sample_prompts"].tolist() == [0, 0, 1, 1, 1] * 2
    assert (tree["setting"], tree["budget"], tree["rows"], tree["context"], tree["streams"]) == (7.0, 7, 8, 41, 1)
    assert rows["ar", "round_ms"]["value"] == pytest.approx(10.0)
    speed = rows["ddtree", "tokens_per_s"]
    assert (speed["n"], speed["unit"]) == (4, "tokens/s")
    assert speed["value"] == pytest.approx(8 / 0.020)
    assert speed["sample_prompts"].tolist() == [0, 1, 0, 1]
    assert json.loads(tree["case"])["max_new_tokens"] == 9
    assert tree["prompt_set_digest"] == PROMPTS.digest
    assert tree["num_prompts"] == 2
    assert json.loads(tree["provenance"])["method"] is None


def test_arms_take_turns_and_the_first_one_changes(monkeypatch):
    world = World(monkeypatch)
    time_rounds(PAIR, PROMPTS, [AR, TREE], repeats=2)
    warm_up, decodes = world.log[:2], world.log[2:]
    assert warm_up == [("a", 0), ("a", 7)]
    assert decodes == [("a", 0), ("a", 7), ("b", 7), ("b", 0), ("a", 0), ("a", 7), ("b", 7), ("b", 0)]


def test_streams_decode_a_group_together(monkeypatch):
    world = World(monkeypatch)
    four = PromptSet.of("set", [Prompt(f"{name}{i}", "code", text=name) for i, name in enumerate("abab")])
    for name, count in {"a0": 2, "b1": 3, "a2": 2, "b3": 3}.items():
        monkeypatch.setitem(NUM_ROUNDS, name, count)
    tree = by_metric(time_rounds(PAIR, four, [TREE], streams=2))
    assert world.log[2:] == [(prompt.id, 7) for prompt in four]
    assert tree["ddtree", "round_ms"]["sample_prompts"].tolist() == [0, 0, 0, 2, 2, 2]
    assert tree["ddtree", "tokens_per_s"]["samples"].tolist() == pytest.approx([5 * 8 / 0.060] * 2)
    assert tree["ddtree", "tokens_per_round"]["samples"].tolist() == [8.0, 8.0]
    with pytest.raises(ArgumentError, match="a multiple of 3 streams"):
        time_rounds(PAIR, four, [TREE], streams=3)


def test_a_machine_that_slows_down_meets_all_arms(monkeypatch):
    monkeypatch.setitem(ROUND_S, 7, ROUND_S[0])
    World(monkeypatch, drift=0.001)
    rows = by_metric(time_rounds(PAIR, PROMPTS, [AR, TREE], repeats=6))
    first, second = rows["ar", "round_ms"]["value"], rows["ddtree", "round_ms"]["value"]
    assert abs(first - second) <= 1.0  # ms, one step of the drift; one arm after the other would give 12
    assert first > 15.0


def test_few_prompts_are_marked_and_enough_are_not(monkeypatch):
    World(monkeypatch)
    assert set(time_rounds(PAIR, PROMPTS, [AR])["note"]) == {"2 prompts, fewer than 5"}
    monkeypatch.setattr(rounds, "MIN_PROMPTS", 2)
    assert time_rounds(PAIR, PROMPTS, [AR])["note"].isna().all()


def test_random_text_is_marked_as_simulated(monkeypatch):
    World(monkeypatch)
    random = PromptSet.of("set", [Prompt("a", "random", token_ids=(1,))])
    assert time_rounds(PAIR, random, [AR])["simulated"].all()
    assert not time_rounds(PAIR, PROMPTS, [AR])["simulated"].any()


def test_a_prompt_that_ends_at_once_adds_no_round(monkeypatch):
    World(monkeypatch)
    ends, goes_on = Prompt("c", "text", text="z"), Prompt("a", "text", text="x")
    rows = time_rounds(PAIR, PromptSet.of("set", [ends, goes_on]), [AR])
    assert set(samples_frame(rows)["prompt"]) == {1}
    with pytest.raises(ArgumentError, match="prompts"):
        time_rounds(PAIR, PromptSet.of("set", [ends]), [AR])


def test_a_round_on_a_gpu_lasts_from_record_to_record(monkeypatch):
    World(monkeypatch, asynchronous=True)
    rows = by_metric(time_rounds(GPU, PROMPTS, [AR]))
    assert rows["ar", "round_ms"]["samples"].tolist() == pytest.approx([10.0] * 5)
    monkeypatch.setattr(rounds, "_wait", lambda device: None)
    rows = by_metric(time_rounds(GPU, PROMPTS, [AR]))
    assert max(rows["ar", "round_ms"]["samples"]) > 1000.0  # the prefill would stand in the first round


def test_arms_are_captured_together_or_not_at_all_unless_asked(monkeypatch):
    World(monkeypatch)
    both = by_metric(time_rounds(GPU, PROMPTS, [AR, TREE]))
    assert {row["graph"] for row in both.values()} == {"graph"}
    with_beam = time_rounds(GPU, PROMPTS, [AR, Arm("beam", 7, 2), Arm("ddtree", 7, graph="on")])
    modes = {row["method"]: row["graph"] for row in by_metric(with_beam).values()}
    assert modes == {"ar": "eager", "beam": "eager", "ddtree": "graph"}
    with pytest.raises(ComparisonError, match="graph: round times of 2 graph modes"):
        cost_table(with_beam)


def test_progress_counts_decodes(monkeypatch):
    World(monkeypatch)
    seen = []
    time_rounds(PAIR, PROMPTS, [AR, TREE], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("arms", "options", "message"),
    [
        ([], {}, "arms"),
        ([AR, Arm("ar", 0)], {}, "distinct"),
        ([AR], {"repeats": 0}, "repeats"),
        ([AR], {"streams": 0}, "streams"),
        ([Arm("ddtree", 7, rounds="both")], {}, "arm.rounds"),
    ],
)
def test_wrong_arguments(monkeypatch, arms, options, message):
    world = World(monkeypatch)
    with pytest.raises(ArgumentError, match=message):
        time_rounds(PAIR, PROMPTS, arms, **options)
    assert world.log == []


def test_the_tiny_pair(tmp_path):
    pair, prompts = tiny_pair(), golden_prompts()[:2]
    arms = [Arm("ar"), Arm("chain", 7), Arm("ddtree", 7), Arm("beam", 8, width=2)]
    table = time_rounds(pair, prompts, arms, max_new_tokens=8)
    rows = by_metric(table)
    run = kdlab.generate(pair, prompts[1], method="ddtree", budget=7, max_new_tokens=8)
    long = samples_frame(table).query("metric == 'round_ms' and method == 'ddtree'")
    assert (long["prompt"] == 1).sum() == len(run.rounds[0])
    assert (long["value"] > 0).all()
    assert rows["beam", "round_ms"]["setting"] == 2.0
    assert rows["beam", "round_ms"]["rows"] == 9
    assert rows["ar", "round_ms"]["n"] >= rows["ddtree", "round_ms"]["n"]
    assert rows["chain", "tokens_per_s"]["drafter_sha256"] == pair.drafter_sha256
    assert table["gpu"].isna().all()
    write_rows(table, tmp_path / "rounds.parquet")


# -- rounds of the host ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 4])
def test_rounds_of_the_host_write_the_same_text_in_the_same_rounds(streams):
    pair, options = tiny_pair(), {"max_new_tokens": 24, "stop_token_ids": [ord("=")]}
    prompts = as_prompt_set(["the ", *golden_prompts(), "the king calls the ship. 7+5", "5+40", "a"])
    run = kdlab.generate(pair, prompts, budget=9, streams=streams, **options)
    host = HostRounds(pair, prompts, make_settings(pair, len(prompts), budget=9, streams=streams, **options))
    for _ in range(2):
        seen = {index: [] for index in range(len(prompts))}
        host.admit()
        while not host.done:
            for one in host.step():
                seen[one.prompt].append((one.anchor_position, one.num_tokens))
        assert [transcript.output_ids for transcript in host.transcripts] == run.output_ids
        for index, records in enumerate(run.rounds):
            assert seen[index] == [(record.anchor_position, record.num_tokens) for record in records]
        host.restart()


def test_rounds_of_the_host_are_timed_beside_ours():
    arms = [Arm("ddtree", 7), Arm("ddtree", 7, rounds="host")]
    table = time_rounds(tiny_pair(), golden_prompts(), arms, max_new_tokens=8, streams=2)
    per_round = table[table["metric"] == "tokens_per_round"]
    assert [json.loads(case)["rounds"] for case in per_round["case"]] == ["device", "host"]
    assert per_round["samples"].iloc[0].tolist() == per_round["samples"].iloc[1].tolist()


@pytest.mark.parametrize("arm", [Arm("ar", 0), Arm("chain", 7), Arm("ddtree", 0)], ids=str)
def test_the_host_has_rounds_of_trees_alone(arm):
    with pytest.raises(NotSupported, match="ddtree"):
        time_rounds(tiny_pair(), "the ", [dataclasses.replace(arm, rounds="host")])
    with pytest.raises(NotSupported, match="greedy"):
        time_rounds(tiny_pair(), "the ", [Arm("ddtree", 7, rounds="host")], temperature=0.5)
