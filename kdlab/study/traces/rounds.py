"""Rounds that any engine measured, by their accepted lengths: what a trace without the draft field holds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import pyarrow as pa

from kdlab.decode.records import Run
from kdlab.errors import ArgumentError, SchemaError
from kdlab.parquet import TableFormat
from kdlab.study.traces.rules import RoundChecker, provenance_faults

ROUND_TRACE_FORMAT = TableFormat(
    kind="trace_rounds",
    version=1,
    fields=(
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        *(pa.field(name, pa.int32(), nullable=False) for name in ("round", "accepted", "drafted")),
        pa.field("parents", pa.list_(pa.int32())),
    ),
)


@dataclass(frozen=True)
class TracedPrompt:
    """The rounds of one prompt, in order.

    Attributes:
        prompt_id, kind: name, and kind of text.
        accepted: draft tokens that each round accepted, its bonus token not counted.
        drafted: nodes that each round verified beside its root.
        parents: of each round's tree, node 0 the root with parent -1; None where only its size is known.
    """

    prompt_id: str
    kind: str
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    parents: tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, eq=False)
class RoundTrace:
    """Measured rounds of one method at one budget, and where they come from; they say nothing of other budgets."""

    prompts: list[TracedPrompt]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        rounds = sum(len(prompt.accepted) for prompt in self.prompts)
        return f"RoundTrace(method={self.method!r}, budget={self.budget}, num_prompts={len(self.prompts)}, {rounds=})"

    @property
    def method(self) -> str:
        """What made the rounds, one of `kdlab.study.traces.rules.METHODS`."""
        return str(self.provenance["method"])

    @property
    def budget(self) -> int:
        """Most nodes that a round may verify beside its root."""
        return int(self.provenance["budget"])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row a round, with the columns of the format."""
        for prompt in self.prompts:
            columns = zip(prompt.accepted, prompt.drafted, prompt.parents, strict=True)
            for number, (accepted, drafted, parents) in enumerate(columns):
                yield {
                    "prompt_id": prompt.prompt_id,
                    "kind": prompt.kind,
                    "round": number,
                    "accepted": accepted,
                    "drafted": drafted,
                    "parents": None if parents is None else list(parents),
                }


def round_faults(rows: Iterable[object], provenance: object) -> Iterator[tuple[int | None, str]]:
    """Yield each fault of a trace as (index of its row, sentence); the index is None for faults of the provenance."""
    faults = provenance_faults(provenance, of_rounds=True)
    yield from ((None, fault) for fault in faults)
    is_known = isinstance(provenance, Mapping) and not faults
    # With a wrong budget the rounds are still checked for all else.
    method, budget = (provenance["method"], provenance["budget"]) if is_known else ("tree", 2**31)  # type: ignore[index]
    checker, index = RoundChecker(method, budget), -1
    for index, row in enumerate(rows):
        yield from ((index, fault) for fault in checker.faults(row))
    if index < 0:
        yield None, "expected at least one round, got none"


def round_trace(rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]) -> RoundTrace:
    """Make a trace of one row a round.

    Args:
        rows: prompt_id, kind, round (0, 1, ... in each prompt), accepted, drafted, and parents where they are known.
        provenance: what `docs/traces.md` asks for.

    Raises:
        SchemaError: the first row or field of the provenance that is wrong.
    """
    for index, fault in round_faults(rows, provenance):
        raise SchemaError(fault if index is None else f"round {index}: {fault}")
    return gather_rounds(rows, provenance)


def gather_rounds(rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]) -> RoundTrace:
    """Make a trace of rows that were checked."""
    prompts = []
    for (prompt_id, kind), group in groupby(rows, key=lambda row: (row["prompt_id"], row["kind"])):
        rounds = list(group)
        trees = [row.get("parents") for row in rounds]
        prompts.append(
            TracedPrompt(
                prompt_id,
                kind,
                accepted=tuple(row["accepted"] for row in rounds),
                drafted=tuple(row["drafted"] for row in rounds),
                parents=tuple(None if tree is None else tuple(tree) for tree in trees),
            )
        )
    return RoundTrace(prompts, provenance)


def trace_of_run(run: Run) -> RoundTrace:
    """Keep of a run of `kdlab.generate` what a trace holds; a prompt without a round leaves nothing."""
    if not isinstance(run, Run):
        raise ArgumentError("run", "a Run", type(run).__name__)
    prompts = [
        TracedPrompt(
            prompt.id,
            prompt.kind,
            accepted=tuple(record.num_tokens - 1 for record in rounds),
            drafted=tuple(record.tree.capacity - 1 for record in rounds),
            parents=tuple(tuple(record.tree.parent[0].tolist()) for record in rounds),
        )
        for prompt, rounds in zip(run.prompts, run.rounds, strict=True)
        if rounds
    ]
    return RoundTrace(prompts, run.provenance)
