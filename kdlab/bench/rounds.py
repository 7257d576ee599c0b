"""Wall time of live rounds: every arm decodes the same prompts, in turns, on one device; and its use as a cost."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch

from kdlab.bench.rows import bench_row, rows_frame, state_columns
from kdlab.checks import check_int
from kdlab.decode import Engine, start
from kdlab.decode.decoding import Progress, decode_provenance
from kdlab.decode.methods import Method
from kdlab.decode.records import RoundRecord
from kdlab.errors import ArgumentError, ComparisonError
from kdlab.machine import gpu_state
from kdlab.model.pair import Pair
from kdlab.model.prompts import Prompt, PromptSet, as_prompt_set
from kdlab.study import CostTable
from kdlab.study.bootstrap import MIN_PROMPTS
from kdlab.study.compare import is_simulated

WARMUP_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Arm:
    """What is timed against the others: arguments of `kdlab.generate`, with its defaults."""

    method: str
    budget: int = 32
    width: int | None = None


@dataclass(slots=True)
class _Samples:
    """Times of one arm; the lists of prompts say which prompt each sample came from."""

    method: Method
    round_ms: list[float] = field(default_factory=list)
    round_prompts: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    run_prompts: list[int] = field(default_factory=list)


def time_rounds(
    pair: Pair,
    prompts: object,
    arms: Sequence[Arm],
    *,
    max_new_tokens: int = 96,
    seed: int = 0,
    temperature: float = 0.0,
    repeats: int = 1,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Time live rounds, one stream at a time.

    The arms take turns prompt by prompt, and the arm that begins changes with every prompt, so that a drift of the
    machine meets all of them. A round is timed from idle device to idle device, the making of its record included;
    prefill and each arm's warm-up rounds are outside. With fewer than 5 prompts every row carries a note.

    Args:
        pair, prompts, max_new_tokens, seed, temperature: as in `kdlab.generate` of each prompt alone, so that the noise
            above temperature 0 is that of prompt 0 for all.
        arms: distinct arms, at least one.
        repeats: how often every arm decodes every prompt.
        progress: called with (decodes done, decodes in all).

    Returns:
        Result rows of op "round", two an arm, samples and their prompts kept in them (see `samples_frame`): round_ms,
        the samples being rounds; tokens_per_s, the samples being whole decodes: tokens of all rounds over the time of
        all rounds. `rows` are the verify rows of a full tree, `context` the median of committed rows.

    Raises:
        ArgumentError: no arm or one twice, no prompt with a round, or what `kdlab.generate` refuses.
    """
    _check_arms(arms)
    repeats = check_int("repeats", repeats, minimum=1)
    chosen = as_prompt_set(prompts)
    options = {"max_new_tokens": max_new_tokens, "seed": seed, "temperature": temperature, "streams": 1}
    samples: dict[Arm, _Samples] = {}
    for arm in arms:
        engine = _warm_up(pair, chosen.prompts[0], arm, options)
        samples[arm] = _Samples(engine.settings.method)
    provenance = _provenance(engine, chosen)
    before = gpu_state(pair.device)
    turns = list(itertools.product(range(repeats), range(len(chosen))))
    for turn, (_, index) in enumerate(turns):
        for place, arm in enumerate(_rotated(arms, turn)):
            _time_decode(pair, chosen.prompts[index], index, arm, options, samples[arm])
            if progress is not None:
                progress(turn * len(arms) + place + 1, len(turns) * len(arms))
    shared = state_columns(before, gpu_state(pair.device)) | _labels(chosen, provenance)
    case = {**options, "repeats": repeats, "warmup_rounds": WARMUP_ROUNDS}
    return rows_frame([row for arm in arms for row in _rows(arm, samples[arm], provenance, case, shared)])


def cost_table(rows: pd.DataFrame) -> CostTable:
    """Return the round times of one `time_rounds` call as a CostTable.

    Its arms decoded the same texts, so their median contexts differ only by where rounds start: the table holds the
    median of those medians as the context of all arms.

    Args:
        rows: result rows of op "round"; other ops and metrics are left out.

    Raises:
        ArgumentError: no round times among the rows.
        ComparisonError: rows of several calls.
    """
    times = rows[(rows["op"] == "round") & (rows["metric"] == "round_ms")]
    if times.empty:
        raise ArgumentError("rows", 'rows of op "round", metric "round_ms"', "none")
    if times["run_id"].nunique(dropna=False) > 1:
        raise ComparisonError(f"run_id: round times of {times['run_id'].nunique()} measurements, expected one")
    names = {"median": "round_ms", "p10": "round_ms_p10", "p90": "round_ms_p90"}
    kept = times.drop(columns=["value", "samples", "sample_prompts"]).rename(columns=names).reset_index(drop=True)
    return CostTable(kept.assign(context=round(float(times["context"].median()))))


def _check_arms(arms: Sequence[Arm]) -> None:
    if not arms:
        raise ArgumentError("arms", "at least one", "none")
    if len(set(arms)) < len(arms):
        raise ArgumentError("arms", "distinct arms", list(arms))


def _rotated(arms: Sequence[Arm], turn: int) -> list[Arm]:
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]


def _start(pair: Pair, prompt: Prompt, arm: Arm, options: dict[str, Any]) -> Engine:
    return start(pair, [prompt], method=arm.method, budget=arm.budget, width=arm.width, **options)


def _warm_up(pair: Pair, prompt: Prompt, arm: Arm, options: dict[str, Any]) -> Engine:
    engine = _start(pair, prompt, arm, options)
    for _ in range(WARMUP_ROUNDS):
        if not engine.done:
            engine.step()
    return engine


def _time_decode(
    pair: Pair, prompt: Prompt, index: int, arm: Arm, options: dict[str, Any], samples: _Samples
) -> None:
    """Decode one prompt to its end and add its rounds to `samples`; a prompt without a round adds nothing."""
    engine = _start(pair, prompt, arm, options)
    times_s: list[float] = []
    records: list[RoundRecord] = []
    while not engine.done:
        _wait(pair.device)
        begin = time.perf_counter()
        stepped = engine.step()
        _wait(pair.device)
        times_s.append(time.perf_counter() - begin)
        records += stepped
    samples.round_ms += [1e3 * seconds for seconds in times_s]
    samples.round_prompts += [index] * len(times_s)
    samples.contexts += [record.anchor_position for record in records]
    if times_s:
        samples.tokens_per_s.append(sum(record.num_tokens for record in records) / sum(times_s))
        samples.run_prompts.append(index)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _provenance(engine: Engine, prompts: PromptSet) -> dict[str, Any]:
    """Describe the whole comparison: the prompts together, and no arm in particular."""
    whole = {"prompt_set_id": prompts.id, "prompt_set_digest": prompts.digest, "num_prompts": len(prompts)}
    return decode_provenance(engine, **whole, method=None, budget=None, width=None, top_k=None)


def _labels(prompts: PromptSet, provenance: dict[str, Any]) -> dict[str, Any]:
    few = f"{len(prompts)} prompts, fewer than {MIN_PROMPTS}" if len(prompts) < MIN_PROMPTS else None
    return {"note": few, "simulated": any(is_simulated(provenance, prompt.kind) for prompt in prompts)}


def _rows(
    arm: Arm, samples: _Samples, provenance: dict[str, Any], case: dict[str, Any], shared: dict[str, Any]
) -> list[dict[str, Any]]:
    if not samples.round_ms:
        raise ArgumentError("prompts", "a text that goes on past its first token, for a round to time", "none")
    method = samples.method
    columns: dict[str, Any] = {
        "method": method.name,
        "setting": method.budget if method.width is None else method.width,
        "budget": method.budget,
        "rows": method.budget + 1,
        "context": round(float(np.median(samples.contexts))),
        **shared,
    }
    case = {**case, "top_k": method.top_k}
    measured = (
        ("round_ms", "ms", samples.round_ms, samples.round_prompts),
        ("tokens_per_s", "tokens/s", samples.tokens_per_s, samples.run_prompts),
    )
    return [
        bench_row("round", metric, unit, provenance=provenance, case=case, samples=values, sample_prompts=of, **columns)
        for metric, unit, values, of in measured
    ]
