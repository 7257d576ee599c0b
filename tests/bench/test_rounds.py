"""Wall time of live rounds, on a fake engine with a fake clock, then on the tiny pair."""

import json
from types import SimpleNamespace

import pytest
import torch

import kdlab
from kdlab.bench import Arm, rounds, samples_frame, time_rounds
from kdlab.bench.rows import write_rows
from kdlab.decode.methods import Method
from kdlab.errors import ArgumentError
from kdlab.machine import GPU_STATE_FIELDS
from kdlab.model.prompts import Prompt, PromptSet
from tests.pairs import golden_prompts, tiny_pair

NUM_ROUNDS = {"a": 2, "b": 3, "c": 0}
ROUND_S = {0: 0.010, 7: 0.020}  # by budget
AR, TREE = Arm("ar", 0), Arm("ddtree", 7)


class World:
    """A clock that only rounds and prefills move, and a log of what was decoded.

    An asynchronous world lets the host run ahead: its clock moves when the host waits for the device.
    """

    def __init__(self, monkeypatch, drift=0.0, asynchronous=False):
        self.now, self.pending, self.drift, self.asynchronous, self.log = 100.0, 0.0, drift, asynchronous, []
        monkeypatch.setattr(rounds, "start", self.start)
        monkeypatch.setattr(rounds, "decode_provenance", lambda engine, **more: {"streams": 1, **more})
        monkeypatch.setattr(rounds, "gpu_state", lambda device: dict.fromkeys(GPU_STATE_FIELDS))
        monkeypatch.setattr(rounds.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def work(self, seconds):
        self.pending += seconds
        if not self.asynchronous:
            self.wait(None)

    def wait(self, device):
        self.now, self.pending = self.now + self.pending, 0.0

    def start(self, pair, prompts, *, method, budget, width, **options):
        (prompt,) = prompts
        self.work(5.0)
        self.log.append((prompt.id, budget))
        return Engine(self, prompt, Method(method, budget, width, 1, None, True))


class Engine:
    def __init__(self, world, prompt, method):
        self.world, self.settings = world, SimpleNamespace(method=method)
        self.prompt, self.left = prompt, NUM_ROUNDS[prompt.id]

    @property
    def done(self):
        return self.left == 0

    def step(self):
        self.left -= 1
        budget = self.settings.method.budget
        self.world.work(ROUND_S[budget] + self.world.drift * len(self.world.log))
        return [SimpleNamespace(num_tokens=1 + budget, anchor_position=40 + self.left)]


PAIR = SimpleNamespace(device=torch.device("cpu"))
PROMPTS = PromptSet.of("set", [Prompt("a", "code", text="x"), Prompt("b", "prose", text="y")])


def by_metric(rows):
    return {(row["method"], row["metric"]): row for row in rows.to_dict("records")}


def test_rows_of_each_arm(monkeypatch):
    World(monkeypatch)
    rows = by_metric(time_rounds(PAIR, PROMPTS, [AR, TREE], max_new_tokens=9, repeats=2))
    assert len(rows) == 4
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


def test_a_round_on_a_gpu_is_timed_from_idle_to_idle(monkeypatch):
    World(monkeypatch, asynchronous=True)
    rows = by_metric(time_rounds(SimpleNamespace(device=torch.device("cuda", 0)), PROMPTS, [AR]))
    assert rows["ar", "round_ms"]["samples"].tolist() == pytest.approx([10.0] * 5)
    monkeypatch.setattr(rounds, "_wait", lambda device: None)
    with pytest.raises(ZeroDivisionError):  # without waiting, rounds would seem to take no time
        time_rounds(SimpleNamespace(device=torch.device("cuda", 0)), PROMPTS, [AR])


def test_progress_counts_decodes(monkeypatch):
    World(monkeypatch)
    seen = []
    time_rounds(PAIR, PROMPTS, [AR, TREE], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("arms", "options", "message"),
    [([], {}, "arms"), ([AR, Arm("ar", 0)], {}, "distinct"), ([AR], {"repeats": 0}, "repeats")],
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
