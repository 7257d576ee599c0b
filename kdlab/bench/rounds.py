"""Wall time of live rounds: every arm decodes the same prompts, in turns, on one device; and its use as a cost."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch

from kdlab.bench.host_rounds import HostRound, HostRounds
from kdlab.bench.rows import bench_row, rows_frame, state_columns
from kdlab.checks import check_choice, check_int
from kdlab.decode import Engine, start
from kdlab.decode.decoding import Progress, decode_provenance
from kdlab.decode.records import RoundRecord
from kdlab.decode.settings import make_settings
from kdlab.errors import ArgumentError, ComparisonError
from kdlab.machine import gpu_state
from kdlab.model.pair import Pair
from kdlab.model.prompts import PromptSet, as_prompt_set
from kdlab.study import CostTable
from kdlab.study.bootstrap import MIN_PROMPTS
from kdlab.study.compare import is_simulated

WARMUP_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Arm:
    """What is timed against the others: arguments of `kdlab.generate`, with its defaults.

    With graph "auto" an arm is captured if all such arms can be, so that they stay comparable. Rounds of the "device"
    are kdlab's; those of the "host" are made as engines do today (see `host_rounds`), greedy DDTree alone.
    """

    method: str
    budget: int = 32
    width: int | None = None
    graph: str = "auto"
    rounds: str = "device"


@dataclass(slots=True)
class _Samples:
    """Times of one arm; the lists of prompts say which prompt each sample came from, the first of its group."""

    round_ms: list[float] = field(default_factory=list)
    round_prompts: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_round: list[float] = field(default_factory=list)
    run_prompts: list[int] = field(default_factory=list)


def time_rounds(
    pair: Pair,
    prompts: object,
    arms: Sequence[Arm],
    *,
    max_new_tokens: int = 96,
    seed: int = 0,
    temperature: float = 0.0,
    streams: int = 1,
    repeats: int = 1,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Time live rounds of groups of prompts.

    The arms take turns group by group, and the arm that begins changes with every group, so that a drift of the machine
    meets all of them. A round lasts from where the host holds the records of the one before (the first: from an idle
    device) to where it holds its own; the next captured one runs meanwhile. Prefill, capture and each arm's warm-up
    rounds are outside. With fewer than 5 prompts every row carries a note.

    Args:
        pair, prompts, max_new_tokens, seed, temperature: as in `kdlab.generate`.
        arms: distinct arms, at least one.
        streams: prompts of a group, decoded together; they divide the prompts.
        repeats: how often every arm decodes every group.
        progress: called with (decodes done, decodes in all).

    Returns:
        Result rows of op "round", three an arm, samples and their prompts kept in them (see `samples_frame`): round_ms,
        the samples being rounds; tokens_per_s and tokens_per_round, the samples being decodes of a group: tokens of all
        rounds over the time of all rounds, and over their number, stream by stream. `rows` are the verify rows of a
        full tree, `context` the median of committed rows.

    Raises:
        ArgumentError: no arm or one twice, prompts that the streams do not divide, none with a round, or what
            `kdlab.generate` refuses.
        NotSupported: an arm that cannot run as asked.
    """
    _check_arms(arms)
    repeats, streams = check_int("repeats", repeats, minimum=1), check_int("streams", streams, minimum=1)
    chosen = as_prompt_set(prompts)
    if len(chosen) % streams:
        raise ArgumentError("prompts", f"a multiple of {streams} streams", len(chosen))
    options = {"max_new_tokens": max_new_tokens, "seed": seed, "temperature": temperature, "streams": streams}
    engines = _engines(pair, chosen, arms, options)
    samples = {arm: _Samples() for arm in arms}
    provenance = _provenance(engines, chosen)
    before = gpu_state(pair.device)
    turns = list(itertools.product(range(repeats), range(0, len(chosen), streams)))
    for turn, (_, first) in enumerate(turns):
        for place, arm in enumerate(_rotated(arms, turn)):
            if first == 0:
                engines[arm].restart()
            _time_group(engines[arm], first, pair.device, samples[arm])
            if progress is not None:
                progress(turn * len(arms) + place + 1, len(turns) * len(arms))
    shared = state_columns(before, gpu_state(pair.device)) | _labels(chosen, provenance)
    case = {**options, "repeats": repeats, "warmup_rounds": WARMUP_ROUNDS}
    return rows_frame([row for arm in arms for row in _rows(arm, engines[arm], samples[arm], provenance, case, shared)])


def cost_table(rows: pd.DataFrame) -> CostTable:
    """Return the round times of one `time_rounds` call as a CostTable.

    Its arms decoded the same texts, so their median contexts differ only by where rounds start: the table holds the
    median of those medians as the context of all arms.

    Args:
        rows: result rows of op "round"; other ops and metrics are left out.

    Raises:
        ArgumentError: no round times among the rows.
        ComparisonError: rows of several calls, or of captured and eager rounds.
    """
    times = rows[(rows["op"] == "round") & (rows["metric"] == "round_ms")]
    if times.empty:
        raise ArgumentError("rows", 'rows of op "round", metric "round_ms"', "none")
    for column, what in (("run_id", "measurements"), ("graph", "graph modes")):
        if times[column].nunique(dropna=False) > 1:
            raise ComparisonError(f"{column}: round times of {times[column].nunique()} {what}, expected one")
    names = {"median": "round_ms", "p10": "round_ms_p10", "p90": "round_ms_p90"}
    kept = times.drop(columns=["value", "samples", "sample_prompts"]).rename(columns=names).reset_index(drop=True)
    return CostTable(kept.assign(context=round(float(times["context"].median()))))


def _check_arms(arms: Sequence[Arm]) -> None:
    if not arms:
        raise ArgumentError("arms", "at least one", "none")
    if len(set(arms)) < len(arms):
        raise ArgumentError("arms", "distinct arms", list(arms))
    for arm in arms:
        check_choice("arm.rounds", arm.rounds, ("device", "host"))


def _rotated(arms: Sequence[Arm], turn: int) -> list[Arm]:
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]


def _engines(
    pair: Pair, prompts: PromptSet, arms: Sequence[Arm], options: dict[str, Any]
) -> dict[Arm, Engine | HostRounds]:
    """Make and warm up an engine an arm; those with graph "auto" are all captured, or none is."""
    engines = {arm: _engine(pair, prompts, arm, arm.graph, options) for arm in arms}
    free = [arm for arm in arms if arm.graph == "auto"]
    if len({engines[arm].settings.graph for arm in free}) > 1:
        engines |= {arm: _engine(pair, prompts, arm, "off", options) for arm in free}
    for engine in engines.values():
        engine.admit()
        for _ in range(WARMUP_ROUNDS):
            if engine.num_running:
                engine.step(admit=False)
    return engines


def _engine(pair: Pair, prompts: PromptSet, arm: Arm, graph: str, options: dict[str, Any]) -> Engine | HostRounds:
    asked = {"method": arm.method, "budget": arm.budget, "width": arm.width, "graph": graph, **options}
    if arm.rounds == "device":
        return start(pair, prompts, **asked)
    return HostRounds(pair, prompts, make_settings(pair, len(prompts), **asked))


def _time_group(engine: Engine | HostRounds, first: int, device: torch.device, samples: _Samples) -> None:
    """Decode the next prompts to their end and add their rounds to `samples`; a group without a round adds nothing."""
    engine.admit()
    _wait(device)
    times_s: list[float] = []
    records: list[RoundRecord | HostRound] = []
    begin = time.perf_counter()
    while engine.num_running:
        read = engine.step(admit=False)
        if read:  # the first step of captured rounds reads nothing
            end = time.perf_counter()
            times_s.append(end - begin)
            begin = end
            records += read
    samples.round_ms += [1e3 * seconds for seconds in times_s]
    samples.round_prompts += [first] * len(times_s)
    samples.contexts += [record.anchor_position for record in records]
    if times_s:
        tokens = sum(record.num_tokens for record in records)
        samples.tokens_per_s.append(tokens / sum(times_s))
        samples.tokens_per_round.append(tokens / len(records))
        samples.run_prompts.append(first)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _provenance(engines: dict[Arm, Engine | HostRounds], prompts: PromptSet) -> dict[str, Any]:
    """Describe the whole comparison: the prompts together, and no arm in particular."""
    engine = next(iter(engines.values()))
    return decode_provenance(
        engine.pair, engine.settings, prompts, impl=engine.impl, method=None, budget=None, width=None, top_k=None
    )


def _labels(prompts: PromptSet, provenance: dict[str, Any]) -> dict[str, Any]:
    few = f"{len(prompts)} prompts, fewer than {MIN_PROMPTS}" if len(prompts) < MIN_PROMPTS else None
    return {"note": few, "simulated": any(is_simulated(provenance, prompt.kind) for prompt in prompts)}


def _rows(
    arm: Arm,
    engine: Engine | HostRounds,
    samples: _Samples,
    provenance: dict[str, Any],
    case: dict[str, Any],
    shared: dict[str, Any],
) -> list[dict[str, Any]]:
    if not samples.round_ms:
        raise ArgumentError("prompts", "a text that goes on past its first token, for a round to time", "none")
    method = engine.settings.method
    columns: dict[str, Any] = {
        "method": method.name,
        "setting": method.budget if method.width is None else method.width,
        "budget": method.budget,
        "rows": method.budget + 1,
        "context": round(float(np.median(samples.contexts))),
        "graph": "graph" if engine.settings.graph else "eager",
        "impl": engine.impl,
        **shared,
    }
    case = {**case, "top_k": method.top_k, "rounds": arm.rounds}
    measured = (
        ("round_ms", "ms", samples.round_ms, samples.round_prompts),
        ("tokens_per_s", "tokens/s", samples.tokens_per_s, samples.run_prompts),
        ("tokens_per_round", "tokens", samples.tokens_per_round, samples.run_prompts),
    )
    return [
        bench_row("round", metric, unit, provenance=provenance, case=case, samples=values, sample_prompts=of, **columns)
        for metric, unit, values, of in measured
    ]
