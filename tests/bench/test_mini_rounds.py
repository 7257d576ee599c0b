"""The round's benchmark on a small pair: its arms, its table and what it says of them."""

import pytest

from kdlab.bench.mini_rounds import bench_mini_rounds, k26_round_us, mini_arms, mini_prompts, mini_table, verdict_lines
from kdlab.bench.rows import bench_row, read_rows, rows_frame, write_rows
from tests.pairs import golden_prompts, tiny_pair


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
    assert f"{400 / (400 + k26_round_us(32, 1)):.1%} of a K2.6 round" in graph


def test_a_k26_round_takes_milliseconds_and_grows_with_rows_and_streams():
    assert 1_000 < k26_round_us(1, 1) < k26_round_us(32, 1) < k26_round_us(32, 8) < 100_000
