"""What measured rounds say: the common table of their own arm, its summary, and what they cannot say."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from kdlab.decode.field import DraftField
from kdlab.errors import ArgumentError
from kdlab.study.bootstrap import MIN_PROMPTS
from kdlab.study.compare import ACCEPTANCE_FIELDS, TRACE_FIELDS, check_comparable, is_simulated
from kdlab.study.controls import sweep_chains
from kdlab.study.summary import summarize
from kdlab.study.sweeps import sweep, sweep_ar
from kdlab.study.traces.rounds import RoundTrace
from kdlab.study.walk import COLUMNS, rounds_row


def traces_table(traces: RoundTrace | Sequence[RoundTrace]) -> pd.DataFrame:
    """Put measured rounds into the table that every sweep returns, for `summarize`, `length_histogram` and the plots.

    Args:
        traces: one trace, or several that are to stand side by side: each an arm of its own.

    Returns:
        One row a (trace, prompt) with the columns of `kdlab.study.walk.COLUMNS` and engine ("kdlab" of its own runs) to
        summarize by where engines share an arm. The setting is the budget, a beam's its width; rows are drafted nodes
        + 1.

    Raises:
        ArgumentError: something is no RoundTrace.
        ComparisonError: the traces differ in a field of `kdlab.study.compare.TRACE_FIELDS`, which is named.
    """
    chosen = [traces] if isinstance(traces, RoundTrace) else traces
    if not isinstance(chosen, Sequence) or not chosen or not all(isinstance(one, RoundTrace) for one in chosen):
        raise ArgumentError("traces", "a RoundTrace, or several", repr(traces)[:60])
    check_comparable([trace.provenance for trace in chosen], fields=TRACE_FIELDS)
    return pd.DataFrame.from_records([row for trace in chosen for row in _rows(trace)], columns=[*COLUMNS, "engine"])


def trace_summary(trace: RoundTrace | DraftField, budgets: Sequence[int] | None = None) -> pd.DataFrame:
    """Summarize a trace: its own arm where it holds rounds, every arm that can be computed where it holds a field.

    Args:
        trace: from `kdlab.study.load_trace`.
        budgets: tree budgets, for a draft field only; None takes the powers of two, less one, up to its top K.

    Returns:
        As `kdlab.study.summarize`: tokens per round, bonus included, with its interval over prompts.

    Raises:
        ArgumentError: budgets were asked of rounds, which say nothing of other budgets than their own.
    """
    if isinstance(trace, RoundTrace):
        if budgets is not None:
            expected = f"None for rounds, which say nothing of other budgets than their own {trace.budget}"
            raise ArgumentError("budgets", expected, list(budgets))
        return summarize(traces_table(trace))
    if not isinstance(trace, DraftField):
        raise ArgumentError("trace", "a RoundTrace or a DraftField", type(trace).__name__)
    largest = trace.top_k
    chosen = [2**power - 1 for power in range(1, largest.bit_length() + 1) if 2**power - 1 <= largest]
    tables = [sweep(trace, chosen if budgets is None else budgets), sweep_chains(trace), sweep_ar(trace)]
    return summarize(pd.concat(tables, ignore_index=True))


def trace_limits(trace: RoundTrace | DraftField) -> list[str]:
    """Say in sentences what a trace cannot answer, and what its provenance leaves open."""
    provenance = trace.provenance
    if isinstance(trace, RoundTrace):
        lines = [
            f"These rounds speak for {trace.method} of budget {trace.budget} alone: other budgets, ranks and"
            " calibration need the draft field."
        ]
        if provenance.get("round_order") == "unknown":
            lines.append("The order of a prompt's rounds is not known: they came as histograms.")
    else:
        lines = [] if trace.whole_vocabulary else [f"Budgets above {trace.top_k} candidates are not in this field."]
    num_prompts = len(trace.prompts)
    if num_prompts < MIN_PROMPTS:
        given = "1 prompt gives" if num_prompts == 1 else f"{num_prompts} prompts give"
        lines.append(f"{given} no interval: it takes {MIN_PROMPTS}.")
    unknown = [name for name in TRACE_FIELDS if provenance.get(name) is None and name not in ("target", "drafter")]
    if unknown:
        lines.append(f"Not known: {', '.join(unknown)}; results that know them are not compared with this one.")
    return lines


def _rows(trace: RoundTrace) -> list[dict[str, Any]]:
    provenance, method, budget = trace.provenance, trace.method, trace.budget
    setting = float(provenance["width"] if method == "beam" and provenance.get("width") else budget)
    common = {name: provenance.get(name) for name in ACCEPTANCE_FIELDS} | {"top_k": provenance.get("top_k")}
    arm = {"method": method, "setting": setting, "budget": budget, "truncated": False}
    rows = []
    for index, prompt in enumerate(trace.prompts):
        place = {"prompt": index, "prompt_id": prompt.prompt_id, "kind": prompt.kind}
        lengths = [accepted + 1 for accepted in prompt.accepted]
        row = rounds_row(arm, place, lengths, [drafted + 1 for drafted in prompt.drafted])
        simulated = is_simulated(provenance, prompt.kind)
        rows.append({**row, "simulated": simulated, "engine": provenance.get("engine", "kdlab"), **common})
    return rows
