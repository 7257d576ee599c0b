"""Rounds of models and ops of the kernel benchmark, timed and counted launch by launch within a limit of time."""

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from kdlab.bench import timing
from kdlab.bench.kernels.suite import HEADS, OPS, check_some
from kdlab.bench.profiled import K26, MINI, profiled
from kdlab.checks import check_choice, check_float, check_int
from kdlab.errors import ArgumentError, KdlabError
from kdlab.profiling.counted import MANY_PASSES, METRICS, count_launches
from kdlab.profiling.launches import launches_frame
from kdlab.profiling.timeline import profile_timeline

KINDS = ("timeline", "counters")
COUNTED_LAYERS = 4
"""Layers of "k2.6" whose launches are counted: ncu runs each one alone."""

Found = tuple[pd.DataFrame, list[str]]
Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Limits:
    only: str | None
    repeats: int
    per_layer: bool
    until: float  # of time.monotonic
    tell: Callable[[str], None]


def profile_rounds(
    models: Sequence[str] = (K26, MINI),
    *,
    layers: int | None = None,
    per_layer: bool = False,
    repeats: int = 5,
    only: str | None = None,
    seconds: float = 90.0,
    tell: Callable[[str], None] = print,
    **sizes: Any,
) -> pd.DataFrame:
    """Profile a DDTree round and a prefill of each model.

    Args:
        models: what `profiled_round` takes.
        layers: of "k2.6"; None counts COUNTED_LAYERS, and times these and all.
        per_layer: note the target's layer of each launch.
        repeats: of the timeline.
        only: one of KINDS; None takes both.
        seconds: for all of it; what is under way then ends within half a minute.
        tell: takes a sentence for each thing that was cut, or that this machine cannot do.
        sizes: rows, streams, context, ranks and experts of `profiled_round`.

    Returns:
        Launches of LAUNCHES_FORMAT, none where nothing could be profiled.

    Raises:
        ArgumentError: what `profiled_round` refuses, or a limit that is none.
    """
    if isinstance(models, str) or not models:
        raise ArgumentError("models", "a list or tuple of at least one name", repr(models))
    if layers is not None:
        check_int("layers", layers, minimum=1)
    counted: list[Options] = []
    timed: list[Options] = []
    for model in models:
        few = layers or (COUNTED_LAYERS if model == K26 else None)
        every = [layers] if layers or model != K26 else [None, few]
        counted.append(sizes | {"subject": "round", "model": model, "layers": few})
        timed += [sizes | {"subject": "round", "model": model, "layers": number} for number in every]
    limits = _limits(only, repeats, per_layer, seconds, tell)
    return _together([*(_try("timeline", [options], limits) for options in timed), _try("counters", counted, limits)])


def profile_kernels(
    ops: Sequence[str] = OPS,
    heads: Sequence[int] = HEADS,
    *,
    only: str | None = None,
    seconds: float = 60.0,
    tell: Callable[[str], None] = print,
) -> pd.DataFrame:
    """Profile the ops of `kdlab bench kernels`; the arguments are those of `profiled_kernels` and `profile_rounds`.

    They are counted, and timed where that cannot be done or `only` asks for it.
    """
    check_some("ops", ops, OPS)
    check_some("heads", heads, HEADS)
    options = {"subject": "kernels", "ops": list(ops), "heads": list(heads)}
    limits = _limits(only, 1, False, seconds, tell)
    counted = _try("counters", [options], limits)
    return counted if not counted.empty else _try("timeline", [options], limits)


def _limits(only: str | None, repeats: int, per_layer: bool, seconds: float, tell: Callable[[str], None]) -> _Limits:
    if only is not None:
        check_choice("only", only, KINDS)
    until = time.monotonic() + check_float("seconds", seconds, above=0.0)
    return _Limits(only, check_int("repeats", repeats, minimum=1), per_layer, until, tell)


def _together(found: Sequence[pd.DataFrame]) -> pd.DataFrame:
    some = [frame for frame in found if not frame.empty]
    return pd.concat(some, ignore_index=True) if some else launches_frame([], {})


def _try(kind: str, subjects: list[Options], limits: _Limits) -> pd.DataFrame:
    """Do one job; what this machine cannot do is told, and the others go on."""
    nothing = launches_frame([], {})
    if limits.only not in (None, kind):
        return nothing
    name = f"{kind} of {', '.join(options.get('model', 'the kernels') for options in subjects)}"
    seconds = limits.until - time.monotonic()
    if seconds <= 0.0:
        limits.tell(f"{name}: left out, out of time")
        return nothing
    try:
        found, messages = (_count if kind == "counters" else _watch)(subjects, seconds, limits)
    except ArgumentError:
        raise
    except KdlabError as failure:
        limits.tell(f"{name}: {failure}")
        return nothing
    for line in messages:
        limits.tell(line)
    return found


def _count(subjects: list[Options], seconds: float, limits: _Limits) -> Found:
    timing.require_gpu("hardware counters")
    _let_go()
    once = [name for name in METRICS if name not in MANY_PASSES or subjects[0]["subject"] == "kernels"]
    with tempfile.TemporaryDirectory() as folder:
        facts = Path(folder) / "facts.json"
        task = {"options": subjects, "facts": str(facts), "layers": limits.per_layer, "until": time.time() + seconds}
        child = [sys.executable, "-m", "kdlab.profiling.profile_child", json.dumps(task)]
        return count_launches(child, facts, seconds=seconds, columns=once)


def _watch(subjects: list[Options], seconds: float, limits: _Limits) -> Found:
    _let_go()
    try:
        subject = profiled(**subjects[0])
        return profile_timeline(
            subject.works, subject.provenance, repeats=limits.repeats, layers=limits.per_layer, seconds=seconds
        )
    except torch.OutOfMemoryError as failure:
        raise KdlabError(str(failure).splitlines()[0]) from failure


def _let_go() -> None:
    """Give back the memory of the last subject's weights and graphs."""
    gc.collect()
    torch.cuda.empty_cache()
