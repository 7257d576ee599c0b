"""The kernel benchmark: every arm checked, then timed beside its peers, within a given time."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pandas as pd
import torch

from kdlab.bench.kernels.case import Arm, Case, Inputs
from kdlab.bench.kernels.ceilings import measure_ceilings
from kdlab.bench.kernels.goals import GOAL_GPU
from kdlab.bench.kernels.measured import EAGER, GRAPH, WARM, Row, bound_rows, ceiling_row, error_row, time_row, to_frame
from kdlab.bench.kernels.suite import HEADS, OPS, cases_of, check_some, checks_of, in_turns
from kdlab.bench.rows import state_columns
from kdlab.bench.timing import Call, Pass, make_pass, require_gpu, rotations, sample, stays_in_cache
from kdlab.checks import check_float
from kdlab.errors import KdlabError
from kdlab.kernels.builds import all_builds
from kdlab.kernels.cost import Cost
from kdlab.kernels.jit import Build, arch_of, compile_all, looking_once
from kdlab.machine import gpu_state
from kdlab.provenance import run_provenance

WHOLE_SECONDS = 120.0
"""From here on every case is timed, below it the few that stand for them."""

_MOST_CASE_S, _LEAST_CASE_S = 3.0, 0.02
_MOST_SET_BYTES = 8 << 30
_COMPILERS = 12
_DTYPE_BF16 = 1  # of the define DTYPE, see common.cuh
_FAILURES = (KdlabError, ImportError, RuntimeError)
"""What one arm may fail with while the others go on: not there, not for this card, out of memory, no capture."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class KernelBench:
    """What a run of the benchmark found."""

    rows: pd.DataFrame  # of ROWS_FORMAT
    messages: tuple[str, ...]  # what was cut, what could not run, what was refused as wrong
    fault: str | None = None  # what the device failed with, and at which case; times before it stand


@dataclass(slots=True)
class _Run:
    deadline: float
    whole: bool = True  # every case, arm and mode
    rows: list[Row] = field(default_factory=list)
    messages: dict[str, None] = field(default_factory=dict)  # in order, each once
    barred: set[tuple[str, str]] = field(default_factory=set)  # (op, arm) that is wrong or cannot run
    fault: str | None = None

    def bar(self, op: str, arm: str, why: str) -> None:
        self.barred.add((op, arm))
        self.messages[f"{op}, {arm}: {why}"] = None


def bench_kernels(
    *,
    seconds: float = 25.0,
    ops: Sequence[str] = OPS,
    heads: Sequence[int] = HEADS,
    progress: Progress | None = None,
) -> KernelBench:
    """Time kdlab's kernels and their peers on the GPU at hand, at Kimi K2.6's sizes.

    First the card's ceilings are measured and every arm's result is compared with float64 on small inputs; a wrong arm
    is not timed. Then the cases, arms in turns, in a CUDA graph and eager, with buffers rotated past the L2 cache.

    Args:
        seconds: for all of it, compilation included. Below `WHOLE_SECONDS` only the cases of a short run are timed.
        ops: some of `OPS`.
        heads: some of `HEADS`.
        progress: called with (cases done, cases in all).

    Raises:
        UnsupportedDevice: there is no GPU, or one that kdlab has no kernels for.
        ArgumentError: an unknown op or number of heads.
    """
    seconds = check_float("seconds", seconds, above=0.0)
    check_some("ops", ops, OPS)
    check_some("heads", heads, HEADS)
    require_gpu("bench kernels")
    begin, device = time.monotonic(), torch.device("cuda")
    run = _Run(begin + seconds, whole=seconds >= WHOLE_SECONDS)
    provenance, before, arch = run_provenance(device="cuda", dtype="bfloat16"), gpu_state(device), arch_of(device)
    compile_all([(build, arch) for build in all_builds() if _is_timed(build, arch)], workers=_COMPILERS)
    compiled_s = time.monotonic() - begin
    ceilings = measure_ceilings()
    run.rows += [ceiling_row(ceiling) for ceiling in ceilings.all]
    for case in (case for op in ops for case in checks_of(op, tuple(heads))):
        _check(run, case)
    checked_s = time.monotonic() - begin
    cases = _chosen_cases(run, ops, tuple(heads))
    costs = _time_cases(run, cases, progress)
    judged = GOAL_GPU in str(provenance["gpu"])
    if not judged:
        run.messages[f"goals are set for an {GOAL_GPU}: none is judged on {provenance['gpu']}"] = None
    run.rows += bound_rows(costs, run.rows, ceilings, goals=judged)
    parts = f"{compiled_s:.1f} s until all is compiled, {checked_s:.1f} s until all is checked"
    run.messages[f"{len(costs)} cases in {time.monotonic() - begin:.1f} s: {parts}"] = None
    state = state_columns(before, gpu_state(device))
    return KernelBench(to_frame(run.rows, provenance, state), tuple(run.messages), run.fault)


def _is_timed(build: Build, arch: str) -> bool:
    """Only bfloat16 is timed; builds without a data type serve all."""
    return arch in build.archs and dict(build.defines).get("DTYPE", _DTYPE_BF16) == _DTYPE_BF16


def _raise_fault(where: str) -> None:
    """End the run where the device has failed for good: such an error is no arm's alone."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as failure:
        raise KdlabError(f"bench kernels: the device failed at {where}: {_first_line(failure)}") from failure


def _chosen_cases(run: _Run, ops: Sequence[str], heads: tuple[int, ...]) -> list[Case]:
    every = {op: cases_of(op, heads) for op in ops}
    if run.whole:
        return in_turns(every.values())
    chosen = in_turns([case for case in cases if case.default] for cases in every.values())
    slow = {f"{case.op}, {name}" for case in chosen for name, arm in case.arms.items() if not arm.short}
    words = f"short run: {len(chosen)} of {sum(map(len, every.values()))} cases; without warm caches"
    words += f", nor at large sizes: {'; '.join(sorted(slow))}" if slow else ""
    run.messages[f"{words} (--seconds {WHOLE_SECONDS:g} or more has all)"] = None
    return chosen


def _check(run: _Run, case: Case) -> None:
    """Compare every arm with float64, and bar those that are wrong or cannot run."""
    for name, arm in case.arms.items():
        if (case.op, name) in run.barred:
            continue
        try:
            inputs = case.make(0)
            out = arm.run(arm.prepare(inputs) if arm.prepare else inputs)
            error = arm.error(case.make(0), out)  # fresh, as an arm may write its inputs
        except _FAILURES as failure:
            _raise_fault(f"the check of {case.name}, {name}")
            run.bar(case.op, name, f"cannot run: {_first_line(failure)}")
            continue
        run.rows.append(error_row(case, name, arm, error))
        if not error <= arm.limit:
            run.bar(case.op, name, f"WRONG, not timed: error {error:.3g} above {arm.limit:g} in {case.name}")


def _time_cases(run: _Run, cases: Sequence[Case], progress: Progress | None) -> list[tuple[Case, Cost]]:
    """Give each case its part of the time that is left, and leave out the last ones when none is."""
    costs, set_up_s = [], 0.1
    for done, case in enumerate(cases):
        begin = time.monotonic()
        share = (run.deadline - begin) / (len(cases) - done)
        if share <= 0.0:
            run.messages[_out_of_time(cases, done)] = None
            break
        budget = min(_MOST_CASE_S, max(_LEAST_CASE_S, share - set_up_s))
        try:
            costs.append((case, _time_case(run, case, budget)))
        except torch.OutOfMemoryError:
            run.messages[f"{case.name}: left out, its buffers do not fit this card's memory"] = None
            torch.cuda.empty_cache()
        except RuntimeError as failure:  # of the device: nothing can run after it, but what was timed is on the host
            run.fault = f"case {done + 1} of {len(cases)}, {case.name}: {_first_line(failure)}"
            break
        set_up_s += 0.3 * (max(0.0, time.monotonic() - begin - budget) - set_up_s)
        if progress is not None:
            progress(done + 1, len(cases))
    return costs


def _out_of_time(cases: Sequence[Case], done: int) -> str:
    """Say how many cases are left out, from which on, and the ops that have no time at all for it."""
    timed = {case.op for case in cases[:done]}
    untimed = dict.fromkeys(case.op for case in cases[done:] if case.op not in timed)
    words = f"out of time: {len(cases) - done} cases left out, from {cases[done].name}"
    return f"{words}; nothing is timed of {', '.join(untimed)}" if untimed else words


def _time_case(run: _Run, case: Case, seconds: float) -> Cost:
    """Time all arms of a case that are not barred; returns the mean cost of the buffer sets."""
    count = max(2, min(rotations(case.set_bytes), _MOST_SET_BYTES // case.set_bytes))
    sets, tiny = [case.make(seed) for seed in range(count)], stays_in_cache(case.set_bytes)
    arms = {
        name: arm
        for name, arm in case.arms.items()
        if arm.timed and (arm.short or run.whole) and (case.op, name) not in run.barred
    }
    # One set over and over shows what a warm cache takes off a time; sets that never leave it show it anyway.
    for mode, share in ((GRAPH, 0.65), (WARM, 0.15 if run.whole and not tiny else 0.0), (EAGER, 0.2)):
        able = {name: arm for name, arm in arms.items() if share and (arm.graph or mode == EAGER)}
        if mode == WARM:
            able = {name: arm for name, arm in able.items() if arm.own}
        passes = _passes(run, case, able, sets[:1] if mode == WARM else sets, mode)
        if passes:
            for name, samples in sample(passes, share * seconds).items():
                run.rows.append(time_row(case, name, arms[name], samples, mode, warm=tiny or mode == WARM))
    costs = [case.cost(inputs) for inputs in sets]
    return Cost(*(round(sum(parts) / len(costs)) for parts in zip(*((c.bytes, c.flops) for c in costs), strict=True)))


def _passes(run: _Run, case: Case, arms: Mapping[str, Arm], sets: Sequence[Inputs], mode: str) -> dict[str, Pass]:
    passes = {}
    for name, arm in arms.items():
        try:
            made = make_pass(_calls(arm, sets), graph=mode != EAGER)
            passes[name] = replace(made, run=_as_in_a_round(made.run)) if mode == EAGER else made
        except _FAILURES as failure:
            torch.cuda.synchronize()
            run.messages[f"{case.name}, {name}: cannot run ({mode}): {_first_line(failure)}"] = None
    return passes


def _as_in_a_round(run: Call) -> Call:
    """Launch as an eager round does: with nothing to differentiate, and sources looked at once."""

    def inside() -> None:
        with torch.inference_mode(), looking_once():
            run()

    return inside


def _calls(arm: Arm, sets: Sequence[Inputs]) -> list[Call]:
    return [partial(arm.run, arm.prepare(inputs) if arm.prepare else inputs) for inputs in sets]


def _first_line(failure: BaseException) -> str:
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0]
