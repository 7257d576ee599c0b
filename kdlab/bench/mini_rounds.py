"""The round's benchmark on a small pair: every method, and what the host's part in a round costs, by leaving it in.

The small models take next to no time, so what is left of a round is what an engine adds. At K2.6's width the same
microseconds come on top of a much longer round: `verdict_lines` says how much of it they are.
"""

import json
from collections.abc import Sequence
from functools import partial

import pandas as pd

from kdlab.bench.rounds import Arm, time_rounds
from kdlab.checks import check_int
from kdlab.config import DrafterConfig, TargetConfig
from kdlab.decode.decoding import Progress
from kdlab.model.pair import Pair
from kdlab.model.prompts import PromptSet, load_prompts
from kdlab.paths import DATA, K26_SHAPES
from kdlab.study.gpus import MEASURED_H200
from kdlab.study.step_cost import LAUNCH_US, Step, round_stages

STREAMS = (1, 8)
BUDGETS = (7, 15, 31, 63)
COMPARED_BUDGET, GOAL = 31, 1.5  # rounds of the device against rounds of the host
BOTH = ("device", "host")
KINDS = ("code", "math", "prose", "structured")
_CONTEXT, _G, _RANKS = 1024, 0.8, 8  # of the K2.6 round that stands beside


def mini_prompts(each: int = 10) -> PromptSet:
    """Return the first `each` shipped prompts of every kind, the kinds in turns; ArgumentError below 1."""
    check_int("prompts", each, minimum=1)
    files = [load_prompts(DATA / "prompts" / f"{kind}.jsonl").prompts[:each] for kind in KINDS]
    return PromptSet.of(f"mini-{each}", [prompt for turn in zip(*files, strict=True) for prompt in turn])


def mini_arms(depth_limit: int, *, on_gpu: bool = True) -> list[Arm]:
    """Return the arms: AR, the chain and trees, captured on a GPU; one tree with rounds of the host, and both eager."""
    modes = ("auto", "off") if on_gpu else ("auto",)
    compared = [Arm("ddtree", COMPARED_BUDGET, graph=mode, rounds=rounds) for mode in modes for rounds in BOTH]
    trees = [Arm("ddtree", budget) for budget in BUDGETS if budget != COMPARED_BUDGET]
    return [Arm("ar", 0), Arm("chain", depth_limit), *trees, *compared]


def bench_mini_rounds(
    pair: Pair,
    prompts: PromptSet,
    *,
    streams: Sequence[int] = STREAMS,
    max_new_tokens: int = 96,
    repeats: int = 1,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Time `mini_arms` with every number of streams; see `time_rounds` for the rows.

    Args:
        pair: on a GPU, where the arms are captured; on the CPU all are eager.
        prompts: a multiple of every number of streams.
        streams: prompts decoded together.
        max_new_tokens, repeats: as in `time_rounds`.
        progress: called with (decodes done, decodes in all), for each number of streams from the beginning.
    """
    arms = mini_arms(pair.depth_limit, on_gpu=pair.device.type == "cuda")
    timed = partial(time_rounds, pair, prompts, arms, max_new_tokens=max_new_tokens, repeats=repeats, progress=progress)
    return pd.concat([timed(streams=number) for number in streams], ignore_index=True)


def mini_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row an arm and number of streams.

    Returns:
        Columns streams, method, budget, rounds ("device" or "host"), graph, tokens_per_s, tokens_per_round, round_us
        (medians), and p10 and p90 of round_us.
    """
    keys = ["streams", "method", "budget", "rounds", "graph"]
    cases = rows["case"].map(json.loads)
    named = rows.assign(streams=cases.map(lambda case: case["streams"]), rounds=cases.map(lambda case: case["rounds"]))
    table = named.pivot_table(index=keys, columns="metric", values="median", sort=False).reset_index()
    spread = named[named["metric"] == "round_ms"].set_index(keys)[["p10", "p90"]] * 1e3
    table = table.join(spread, on=keys).assign(round_us=1e3 * table["round_ms"])
    return table[[*keys, "tokens_per_s", "tokens_per_round", "round_us", "p10", "p90"]].rename_axis(columns=None)


def verdict_lines(table: pd.DataFrame) -> list[str]:
    """Say how rounds of the device compare with rounds of the host, and what the difference is of a K2.6 round.

    Args:
        table: from `mini_table`.
    """
    lines = []
    compared = table[(table["method"] == "ddtree") & (table["budget"] == COMPARED_BUDGET)]
    for (number, graph), pair in compared.groupby(["streams", "graph"], sort=False):
        by_rounds = pair.set_index("rounds")
        ratio = by_rounds["tokens_per_s"]["device"] / by_rounds["tokens_per_s"]["host"]
        saved = by_rounds["round_us"]["host"] - by_rounds["round_us"]["device"]
        whole = k26_round_us(COMPARED_BUDGET + 1, int(number))
        met = f" (goal {GOAL}: {'met' if ratio >= GOAL else 'missed'})" if graph == "graph" else ""
        lines.append(
            f"{number} streams, budget {COMPARED_BUDGET}, {graph}: {ratio:.2f}x the tokens/s of rounds of the host"
            f"{met};"
            f" {saved:.0f} us saved a round, at most {saved / (saved + whole):.1%} of a K2.6 round that has them"
            f" ({whole:.0f} us and more without: floors of one rank of {_RANKS}, H200)"
        )
    return lines


def k26_round_us(rows: int, streams: int) -> float:
    """Return the sum of the stages' floors of a K2.6 round on one rank of 8 H200, microseconds: no round is shorter."""
    target, drafter = TargetConfig.load(K26_SHAPES / "target"), DrafterConfig.load(K26_SHAPES / "drafter")
    step = Step.routed(target, rows, _G, streams=streams, context=_CONTEXT, ranks=_RANKS, top_k=max(rows - 1, 1))
    rates = {"bytes_per_s": MEASURED_H200.bytes_per_s, "flops_per_s": MEASURED_H200.flops_per_s}
    return sum(stage.floor_us(**rates, launch_us=LAUNCH_US) for stage in round_stages(target, drafter, step))
