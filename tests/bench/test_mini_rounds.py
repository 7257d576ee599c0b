"""The round's benchmark on a small pair: its arms, its table and what it says of them."""

import json

import pytest

import kdlab
from kdlab.bench import mini_rounds
from kdlab.bench.mini_rounds import bench_mini_rounds, k26_round_us, mini_arms, mini_prompts, mini_table, verdict_lines
from kdlab.bench.rows import bench_row, read_rows, rows_frame, write_rows
from kdlab.cli import main
from kdlab.model.prompts import as_prompt_set
from kdlab.paths import DATA
from tests.pairs import golden_prompts, tiny_pair

RECORDED = DATA / "recorded" / "rounds-mini-h200.parquet"


def test_prompts_of_all_kinds_take_turns():
    prompts = mini_prompts(2)
    assert [prompt.kind for prompt in prompts] == ["code", "math", "prose", "structured"] * 2
    assert len({prompt.id for prompt in prompts}) == 8


def test_every_method_and_both_kinds_of_rounds(tmp_path):
    rows = bench_mini_rounds(tiny_pair(), golden_prompts(), streams=(1, 4), max_new_tokens=6)
    write_rows(rows, tmp_path / "rounds.parquet")
    table = mini_table(read_rows(tmp_path / "rounds.parquet"))
    assert len(table) == len(rows) / 3
    assert set(table["streams"]) == {1, 4}
    assert set(table["graph"]) == {"eager"}
    assert sorted(table["budget"].unique()) == [0, 7, 15, 31, 63]
    assert (table["round_us"].between(table["p10"], table["p90"])).all()
    one = table.set_index(["streams", "method", "budget", "rounds"])
    assert one["tokens_per_round"][1, "ar", 0, "device"] == 1.0
    assert one["tokens_per_round"][1, "ddtree", 31, "host"] == one["tokens_per_round"][1, "ddtree", 31, "device"]
    assert len(set(mini_arms(7))) == len(mini_arms(7)) == len(mini_arms(7, on_gpu=False)) + 2


def rows_of(speeds):
    rows = []
    for (rounds, graph), (tokens_per_s, round_ms) in speeds.items():
        for metric, value in (("tokens_per_s", tokens_per_s), ("round_ms", round_ms), ("tokens_per_round", 3.0)):
            case = {"streams": 1, "rounds": rounds}
            columns = dict(method="ddtree", budget=31, graph=graph)
            rows.append(bench_row("round", metric, "", provenance={}, case=case, samples=[value], **columns))
    return mini_table(rows_frame(rows))


@pytest.mark.parametrize(("speed", "word"), [(6000.0, "met"), (5900.0, "missed")])
def test_the_verdict_compares_like_with_like(speed, word):
    speeds = {("device", "graph"): (speed, 0.5), ("host", "graph"): (4000.0, 0.9)}
    speeds |= {("device", "eager"): (1000.0, 3.0), ("host", "eager"): (800.0, 3.75)}
    graph, eager = verdict_lines(rows_of(speeds))
    assert f"{speed / 4000:.2f}x the tokens/s of rounds of the host (goal 1.5: {word}); 400 us saved" in graph
    assert "eager: 1.25x" in eager
    assert "goal" not in eager
    assert f"at most {400 / (400 + k26_round_us(32, 1)):.1%} of a K2.6 round" in graph


def test_a_k26_round_takes_milliseconds_and_grows_with_rows_and_streams():
    assert 1_000 < k26_round_us(1, 1) < k26_round_us(32, 1) < k26_round_us(32, 8) < 100_000


def test_the_command_prints_a_line_an_arm_and_saves_the_rows(monkeypatch, tmp_path, capsys):
    texts = [text[:20] for text in golden_prompts()] + [text[3:30] for text in golden_prompts()]
    monkeypatch.setattr(kdlab, "load_pair", lambda *args, **options: tiny_pair())
    monkeypatch.setattr(mini_rounds, "mini_prompts", lambda each: as_prompt_set(texts))
    short = ["bench", "rounds", "--max-new-tokens", "3"]
    assert main([*short, "--out", str(tmp_path / "rounds.parquet")]) == 0
    printed = capsys.readouterr().out
    rows = read_rows(tmp_path / "rounds.parquet")
    assert set(rows["metric"]) == {"round_ms", "tokens_per_s", "tokens_per_round"}
    assert len([line for line in printed.splitlines() if "ddtree" in line]) == 2 * 5
    assert "8 streams, budget 31, eager:" in printed
    assert main([*short, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [len(document["rows"]), len(document["verdicts"])] == [14, 2]


def test_recorded_rounds_hold_every_arm_and_the_goal():
    rows = read_rows(RECORDED)
    assert "H200" in rows["gpu"].iloc[0]
    assert rows["dtype"].unique().tolist() == ["bfloat16"]
    table = mini_table(rows)
    assert len(table) == 2 * len(mini_arms(7))
    assert set(table["graph"]) == {"graph", "eager"}
    assert (table.loc[table["method"] == "ar", "tokens_per_round"] == 1.0).all()
    verdicts = verdict_lines(table)
    assert len(verdicts) == 4
    assert sum("goal 1.5: met" in line for line in verdicts) == 2
